"""Ranks compute what one process computes, and checkpoints do not care how many there are."""

import contextlib
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel.launching import launch
from parallel.saved import SAVED
from scratchlm import load_model
from scratchlm.cli.training_setup import TrainArgs, continue_plan
from scratchlm.config.lora import LoRA
from scratchlm.data import TokenFile
from scratchlm.data.conversations import Example
from scratchlm.data.examples import read_examples, write_examples
from scratchlm.errors import ScratchLMError
from scratchlm.training import Data, DataFiles, Learner, Plan
from scratchlm.training.choosing import Machine
from scratchlm.training.loop import _evaluate_if_due
from scratchlm.training.metrics import NoMetrics
from scratchlm.training.plan import write_plan
from scratchlm.training.run import Progress, Run, Writing
from scratchlm.training.session import _make_batches
from scratchlm.training.step import NotFiniteError
from scratchlm.training.tuning import Tuning, make_data
from training.tiny import MODEL as TINY
from training.tiny import log_of, run_training, write_data

TOLERANCE = 2e-6  # of a loss near 4.8: a few units in the last place of float32
BIT_EQUAL = "zero1, 2"  # two ranks are two micro-batches


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return where four processes have left what they found: one launch for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    run_training(folder / "whole", write_data(folder / "data"), SAVED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        launch(4, "all", folder, worlds=30)
    return folder


def read(path):
    return json.loads(path.read_text())


def check_curves(found, tolerance):
    alone = {}
    for path in found.glob("alone-*.json"):
        alone |= read(path)
    together = read(found / "together.json")
    assert alone.keys() == together.keys()
    assert sum(name.startswith(BIT_EQUAL) for name in alone) > 3
    for name, expected in alone.items():
        for (loss, norm), (ours, our_norm) in zip(expected, together[name], strict=True):
            assert ours == pytest.approx(loss, abs=tolerance), name
            assert our_norm == pytest.approx(norm, abs=tolerance), name
        if name.startswith(BIT_EQUAL) and "micro" not in name:
            assert together[name] == expected, name


def test_ranks_train_as_one_process_does(found):
    check_curves(found, TOLERANCE)


@pytest.mark.slow
def test_curves_stay_together_over_fifty_steps(tmp_path):
    launch(8, "long-curves", tmp_path, worlds=20)
    check_curves(tmp_path, 1e-4)


@pytest.mark.parametrize(
    ("error", "whole"), [(NotFiniteError("nan"), True), (ScratchLMError("gone"), False)]
)
def test_a_checkpoint_under_way_is_finished_where_all_ranks_stop(tmp_path, error, whole):
    """A loss that is not finite took the checkpoint of the steps before it along."""
    ranks, written = SimpleNamespace(is_first=True, has_failed=False), []

    def write():
        for _ in range(100):
            time.sleep(0.001)
            if ranks.has_failed:
                raise ScratchLMError("this one is ending")
        written.append(True)

    with contextlib.suppress(ScratchLMError), Run(tmp_path, {}, ranks=ranks) as run:
        run._writing = Writing(3, write)
        raise error
    assert written == [True] * whole


def test_ranks_wait_without_a_limit_for_the_one_that_writes_samples():
    """Tasks may take longer than `train.rank_timeout`."""
    asked = []
    learner = SimpleNamespace(
        ranks=SimpleNamespace(from_first=lambda value: asked.append("wait")),
        settings=SAVED,
        best_weights=lambda: contextlib.nullcontext("model"),
        without_compile=contextlib.nullcontext,
        evaluating=contextlib.nullcontext,
    )
    for sample in (lambda model, step: asked.append("sample"), None):  # the first, another one
        run = SimpleNamespace(progress=Progress(step=4), metrics=NoMetrics())
        _evaluate_if_due(learner, Data(None), run, (), sample, None, lambda: False)
    assert asked == ["sample", "wait", "wait"]


def test_what_is_drawn_is_another_draw_on_every_rank():
    """Dropout masks of two ranks were the same, for other rows."""
    drawn = []
    for rank in (0, 1):
        learner = SimpleNamespace(draws=True, settings=SAVED, ranks=SimpleNamespace(rank=rank))
        for step in (1, 2, 1):
            Learner.begin_step(learner, step)
            drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(one not in drawn[:3] for one in drawn[3:])


@pytest.mark.parametrize("gpu", [False, True])
def test_a_recorded_run_goes_on_where_steps_cannot_be_recorded(tmp_path, gpu):
    """On a CPU, and where ranks talk inside a step: it was refused, and could not be changed."""
    recorded = replace(SAVED, cuda_graph=True, compile="block", parallel="zero1")
    data = write_data(tmp_path / "data")
    write_plan(tmp_path, Plan(TINY, recorded, DataFiles(data / "train.bin", None)))
    asked = {"train": {"parallel": "fsdp"} if gpu else {}}
    said = []
    plan = continue_plan(TrainArgs([], tmp_path, overrides=asked), Machine(1e9, gpu), said.append)
    assert (plan.train.cuda_graph, plan.train.compile) == (False, "off")
    assert said == ["note: train.cuda_graph and train.compile are off from here on"]
    run = Run(tmp_path, {}, changed=plan.changed)
    run._check_settings(tmp_path, recorded.to_dict(), plan.train.to_dict())
    same = continue_plan(TrainArgs([], tmp_path), Machine(1e9, True), said.append)
    assert same.train == recorded  # on a GPU, as it was


@pytest.mark.parametrize("kind", ["text", "examples"])
def test_the_held_out_rows_are_the_same_for_every_number_of_ranks(tmp_path, kind):
    """The best step of a run that goes on with other ranks is chosen on the same rows."""
    data = write_data(tmp_path)
    settings = replace(SAVED, batch_size=7, micro_batch_size=3, eval_batches=4, row_length=8)
    write_examples(
        tmp_path / "val.examples", [Example([n, 1], [False, True]) for n in range(40)], "t"
    )
    examples = {"train": read_examples(tmp_path / "val.examples")}
    examples["val"] = examples["train"]

    def held_out(size):
        read = []
        for rank in range(size):
            ranks = SimpleNamespace(row_rank=rank, row_size=size, data_rank=rank, data_size=size)
            with TokenFile(data / "train.bin") as file:
                files = {"train": file, "val": file}
                plan = Plan(TINY, settings, DataFiles(data / "train.bin", None))
                if kind == "text":
                    found = _make_batches(plan, 7, files, torch.device("cpu"), None, ranks)
                else:
                    plan = replace(plan, tuning=Tuning(LoRA(2), packed=False))
                    device = torch.device("cpu")
                    learner = SimpleNamespace(ranks=ranks, rows=-(-7 // size), device=device)
                    found = make_data(plan, settings, examples, learner)
                for batch in found.validation:
                    counts = (batch.targets != -100).any(1)
                    read += [tuple(row) for row in batch.inputs[counts].tolist()]
        return sorted(read)

    assert len(held_out(1)) == 12
    assert held_out(1) == held_out(2) == held_out(3)


def test_two_ranks_read_bfloat16_and_update_float32(found):
    kinds = read(found / "precision.json")
    for alone, together, _, updated in kinds.values():
        assert all(abs(a[0] - b[0]) < 2e-3 for a, b in zip(alone, together, strict=True))
        assert updated == ["torch.float32"]
    low = {name for name, dtype in kinds["zero1"][2].items() if dtype == "torch.bfloat16"}
    assert {"layers.0.attn.q_proj.weight", "lm_head.weight"} <= low
    assert not any("embeddings" in name or "ln" in name for name in low)


def test_what_ranks_cannot_do_is_named(found):
    faults = read(found / "faults.json")
    assert "the loss of rank 1 is not finite" in faults["not finite"]
    assert faults["heads"] == "train.tp=2 must divide model.num_kv_heads=1"
    assert "train.ema does not go with several ranks" in faults["ema"]
    assert "train.optimizer=muon needs whole matrices" in faults["muon"]
    for name in ("cp × tp", "cp × fsdp"):
        assert faults[name] == "train.cp goes with train.parallel=zero1 alone, without train.tp"
    assert "width" not in faults  # 37 is cut into 18 and 19


def test_ranks_that_share_a_model_generate_what_one_process_does(found):
    for expected, *answers in read(found / "generation.json").values():
        assert answers == [expected, expected]


@pytest.mark.parametrize("tp", [0, -2])
def test_a_number_of_ranks_that_cannot_be_is_refused(tp):
    with pytest.raises(ValueError, match=f"tp must be >= 1; got tp={tp}"):
        load_model("nowhere", tp=tp)


def test_two_ranks_learn_the_adapter_that_one_process_learns(found):
    tuning = read(found / "tuning.json")
    assert tuning["two"] == tuning["one"]  # the log, and all tensors by hash
    log, tensors = tuning["one"]
    assert [line["step"] for line in log if "val_loss" in line] == [0, 3, 6]
    assert all("lora" in name for name in tensors)  # the base is not saved
    for name in ("pairs", "fsdp"):
        assert "several ranks fine-tune on texts, with train.parallel=zero1" in tuning[name]


def check_resumes(folder, count):
    """State by hash where nothing was computed between; then the same log."""
    resumed = read(folder / "resumes.json")
    assert len(resumed) == count
    for name, (before, after, log) in resumed.items():
        assert after == before, name
        steps = [line["step"] for line in log if "loss" in line]
        assert steps == list(range(1, 9)), name  # no step twice, none left out
        for line, expected in zip(log, log_of(folder / "whole"), strict=True):
            for key, value in expected.items():
                assert line[key] == pytest.approx(value, rel=1e-5), (name, line["step"], key)


def test_a_run_saved_by_n_ranks_goes_on_with_m(found):
    check_resumes(found, 2)


def test_ranks_that_share_sequences_log_what_one_process_does(found):
    expected, logged, told = read(found / "cp.json")
    assert told == ["train.tasks are not run: no rank has all weights, in one type"]
    assert [line["step"] for line in expected if "val_loss" in line] == [0, 4, 8]
    for line, whole in zip(logged, expected, strict=True):
        assert line.keys() == whole.keys()
        for key, value in whole.items():
            if value is not None:  # bits per byte of ids that stand for no text
                assert line[key] == pytest.approx(value, rel=1e-5), (line["step"], key)


@pytest.mark.slow
def test_runs_saved_by_1_2_and_4_ranks_go_on_with_1_to_4(tmp_path):
    run_training(tmp_path / "whole", write_data(tmp_path / "data"), SAVED)
    launch(4, "resumes", tmp_path, worlds=60)
    check_resumes(tmp_path, 24)
