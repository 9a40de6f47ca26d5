"""The page of points is the table of points; the example gives what is known."""

import importlib.util
import math
import re
from pathlib import Path

import torch

from scratchlm.inspect import KINDS, head_scores

ROOT = Path(__file__).parent.parent.parent


def test_the_page_lists_every_point_as_the_code_does():
    page = (ROOT / "docs" / "reference" / "points.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `(?:layers\.3\.)?([a-z.]+)` \| (batch [^|]*) \| ([^|]*) \|$", page)
    assert {kind: (axes, what) for kind, axes, what in rows} == KINDS


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_layers_learn_induction_and_one_layer_does_not():
    """Olsson et al., arXiv:2209.11895; the page has the longer run."""
    example = load_example("induction_heads")
    chance = math.log(example.VOCAB)
    two, one = example.attention_only(2), example.attention_only(1)
    example.train(two, 400)
    example.train(one, 200)
    scores = head_scores(two, block=24)
    assert scores.induction[1].max() >= 0.4
    assert scores.induction[0].max() < 0.1
    assert scores.previous_token[0].max() >= 0.4
    assert example.loss_without(two) < 1
    assert example.loss_without(two, 1) >= 0.95 * chance  # the loss of one who knows nothing
    assert head_scores(one, block=24).induction.max() < 0.1
    assert example.loss_without(one) > 2.5
    assert torch.is_grad_enabled()
