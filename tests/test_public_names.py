"""`from scratchlm import …`: the names people need, there and typed."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import scratchlm
from scratchlm.ops import OP_NAMES, OPS

NEEDED = (
    *("ModelConfig", "TransformerLM", "load_model", "generate", "Sampling", "train", "account"),
    *("Tokenizer", "train_bpe", "PRESETS"),
)


def test_the_names_people_need_are_there():
    assert set(NEEDED) <= set(scratchlm.__all__)
    for name in scratchlm.__all__:
        assert getattr(scratchlm, name) is not None
        assert name in dir(scratchlm)
    assert set(scratchlm._HOME) == set(scratchlm.__all__)


def test_importing_the_package_waits_for_nothing():
    code = "import sys, scratchlm; scratchlm.PRESETS; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("op", OP_NAMES)
def test_every_op_has_a_signature_and_a_sentence(kind, op):
    function = getattr(OPS[kind], op)
    signature = inspect.signature(function)
    assert function.__doc__
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter


TYPED = """
import torch
from scratchlm import PRESETS, Sampling, Tokenizer, TransformerLM, account, generate, load_model
model = TransformerLM(PRESETS["demo"])
reveal_type(model(torch.zeros(1, 1)))
reveal_type(load_model("x").model)
reveal_type(generate(model, "x", sampling=Sampling(top_k=3)))
reveal_type(model.ops.softmax(torch.zeros(1)))
"""


def test_a_type_checker_knows_what_a_model_returns(tmp_path):
    mine, root = tmp_path / "mine.py", Path(scratchlm.__file__).parent.parent.parent
    mine.write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(mine)],  # with the settings, and so the cache, of all
        cwd=root,
        env={"MYPYPATH": "src", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    told = [line.partition('type is "')[2].rstrip('"') for line in done.stdout.splitlines()]
    kinds = [kind for kind in told if kind]
    assert [kind.rpartition(".")[2].rstrip("]") for kind in kinds] == [
        *("Tensor", "TransformerLM", "Generation", "Tensor"),
    ], done.stdout
