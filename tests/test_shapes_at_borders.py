"""The shapes written at function borders are claims: beartype and jaxtyping check them."""

import subprocess
import sys

CHECK = """
import warnings
warnings.simplefilter("ignore")
from jaxtyping import install_import_hook
with install_import_hook("scratchlm.ops", "beartype.beartype"), install_import_hook(
    "scratchlm.model", "beartype.beartype"
):
    import scratchlm.model
import torch
from tiny_models import FAMILIES, build, ids
from scratchlm.model import QuestionAnswering, SequenceClassifier

for name, config in FAMILIES.items():
    for ops in ("reference", "fast"):
        model, tokens = build(config, ops), ids(2, 6)
        model.loss(tokens, tokens).backward()
        model.next_token_probabilities(tokens)
        mask = torch.tensor([[False, True, True, True, True, True], [True] * 6])
        cache = model.new_cache(2)
        model(tokens, attention_mask=mask, cache=cache)
        model(tokens[:, :1], cache=cache)
        model(tokens, document_ids=tokens // 8)
        model(tokens, positions=torch.arange(6))
SequenceClassifier(config, 3)(tokens)
QuestionAnswering(config).loss(tokens, tokens[:, 0] % 6, tokens[:, 1] % 6)

from scratchlm.ops import reference
try:
    reference.linear(torch.randn(2, 3), torch.randn(4, 5))
except Exception as error:
    assert "jaxtyping" in type(error).__module__ or "TypeCheck" in type(error).__name__, error
    print("CHECKED")
"""


def test_every_shape_annotation_holds():
    from pathlib import Path

    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        cwd=here,
        env={**__import__("os").environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "CHECKED"
