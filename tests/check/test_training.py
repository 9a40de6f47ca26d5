"""Training with a right file is the reference to the bit; a wrong one is told by its first step."""

import json

import pytest
import torch

from check.command import run
from check.test_command import solution  # noqa: F401
from scratchlm.check.definitions import DEFINITIONS, Functions
from scratchlm.check.training import Step, compare, plain, train_ours, train_theirs
from scratchlm.config import ModelConfig
from scratchlm.data import Batch
from scratchlm.training import TrainConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CONFIG = ModelConfig(vocab_size=50, context_length=12, d_model=16, num_layers=2, num_heads=2)
STEPS = 6


def settings():
    choices = {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "clip": 0.2, "seed": 3}
    return plain(TrainConfig(steps=STEPS, **choices))


def batches():
    state = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(50, (4, 13), generator=state)
        targets = ids[:, 1:].clone()
        targets[0, -4:] = -100
        yield Batch(ids[:, :-1], targets)


def ours():
    return list(train_ours(CONFIG, settings(), batches()))


def theirs(**own):
    return list(train_theirs(Functions(**own), CONFIG, settings(), batches()))


def steps(run):
    return [step for step, _ in run]


def test_the_definitions_train_as_the_reference_ops_do_to_the_bit():
    mine, yours = ours(), theirs()
    assert compare(steps(mine), steps(yours)) is None
    for name, weight in mine[-1][1].items():
        assert torch.equal(weight, yours[-1][1][name]), name


def test_every_function_is_used_in_training():
    calls = set()

    def counted(name):
        def call(*arguments, **keywords):
            calls.add(name)
            return getattr(DEFINITIONS, name)(*arguments, **keywords)

        return call

    bpe = {"run_train_bpe", "get_tokenizer", "run_multihead_self_attention"}
    names = [n for n in dir(DEFINITIONS) if n.startswith(("run_", "get_")) and n not in bpe]
    for name in names:  # one at a time: a block that is called calls the definition's own parts
        theirs(**{name: counted(name)})
    assert calls == set(names)


@pytest.mark.parametrize(
    ("own", "step", "what"),
    [
        ({"run_silu": lambda x: x}, 1, "loss"),
        ({"run_cross_entropy": lambda x, t: DEFINITIONS.run_cross_entropy(x, t) * 1.5}, 1, "loss"),
        (
            {"run_softmax": lambda x, dim: DEFINITIONS.run_softmax(x, dim).detach()},
            1,
            "gradient norm",
        ),
        ({"run_get_lr_cosine_schedule": lambda it, high, *_: high}, 1, "learning rate"),
        ({"get_adamw_cls": lambda: torch.optim.Adam}, 1, "sum of weights"),
        ({"run_gradient_clipping": lambda parameters, limit: None}, 1, "sum of weights"),
        (
            {
                "run_get_lr_cosine_schedule": lambda it, *a: (
                    DEFINITIONS.run_get_lr_cosine_schedule(it, *a) * (2 if it == 4 else 1)
                )
            },
            4,
            "learning rate",
        ),
    ],
)
def test_the_first_step_that_differs_is_named(own, step, what):
    found = compare(steps(ours()), steps(theirs(**own)))
    assert (found.step, found.what) == (step, what)
    assert str(found).startswith(f"step {step}: the {what} is ")


def test_rounding_is_passed_over_where_asked():
    mine = [Step(1.0, 2.0, 0.1, 5.0), Step(0.9, 2.0, 0.1, 5.1)]
    yours = [Step(1.0 + 1e-7, 2.0, 0.1, 5.0), Step(0.9, 2.0, 0.2, 5.1)]
    assert compare(mine, mine) is None
    assert compare(mine, yours).step == 1
    assert (compare(mine, yours, beyond=1e-4).step, compare(mine, yours, beyond=1e-4).what) == (
        2,
        "learning rate",
    )
    assert compare(mine, [Step(float("nan"), 2.0, 0.1, 5.0)], beyond=1e-4).what == "loss"


def test_a_wrong_file_is_trained_and_the_step_is_named(solution, tmp_path):  # noqa: F811
    text = solution.read_text(encoding="utf-8")
    solution.write_text(text.replace("p.mul_(1 - lr *", "p.mul_(1 - 10 * lr *"), encoding="utf-8")
    out = tmp_path / "run"
    found = run("check", solution, "--train", "--steps", 3, "--out", out)
    assert found.status == 1
    assert "the runs part at step 1: the sum of weights is" in found.stdout
    assert "look at clipping or AdamW" in found.stdout
    record = json.loads((out / "curves.json").read_text())
    assert record["definitions"][0] == record["yours"][0]
    assert record["definitions"][1] != record["yours"][1]
    again = run("check", solution, "--train", "--steps", 2, "--out", out)  # takes its place
    assert again.status == 1
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_run_that_fails_names_its_step(solution, tmp_path):  # noqa: F811
    text = solution.read_text(encoding="utf-8")
    wrong = text.replace('t, m, v, g = state["t"]', 't, m, v, g = 1 // (2 - state["t"])')
    assert wrong != text
    solution.write_text(wrong, encoding="utf-8")
    found = run("check", solution, "--train", "--steps", 3, "--out", tmp_path / "run")
    assert found.status == 2
    assert "step 2 ZeroDivisionError" in found.stderr
    assert found.stderr.count("\n") == 1
