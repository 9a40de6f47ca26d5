"""The smallest run there is, and how to make it again: a few milliseconds a step."""

import contextlib
import json

import numpy as np
import torch

from scratchlm import ModelConfig
from scratchlm.data import Batches, TokenFile, ValidationBatches, write_token_file
from scratchlm.training import (
    Data,
    Learner,
    Run,
    TrainConfig,
    build_model,
    fingerprint,
    hold_run,
    make_throughput,
    train,
)

MODEL = ModelConfig(vocab_size=12, context_length=8, d_model=8, num_layers=1, num_heads=2, d_ff=16)
SETTINGS = TrainConfig(steps=60, batch_size=4, eval_every=10, save_every=7, lr=3e-3)


def write_data(directory, count=600, seed=0, vocab_size=12):
    """Write train and val token files of a pattern with some noise."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    ids = (np.arange(count) * 3 + generator.integers(0, 2, count)) % vocab_size
    write_token_file(directory / "train", ids, vocab_size=vocab_size, tokenizer="t")
    write_token_file(directory / "val", ids[: count // 4], vocab_size=vocab_size, tokenizer="t")
    return directory


def make_learner(settings=SETTINGS, model=MODEL, device="cpu", ranks=None):
    return Learner(build_model(model, settings.seed, device), settings, ranks=ranks)


def run_training(directory, data, settings=SETTINGS, model=MODEL, *, warn=None, ranks=None, **more):
    """Start or resume the run in `directory`; return why it ended and the learner."""
    learner = make_learner(settings, model, ranks=ranks)
    among = (0, 1) if ranks is None else (ranks.data_rank, ranks.data_size)
    with (
        contextlib.ExitStack() as stack,
        hold_run(directory) if ranks is None or ranks.is_first else contextlib.nullcontext(),
        TokenFile(data / "train") as ids,
        TokenFile(data / "val") as val,
    ):
        prints = {"train": fingerprint(ids), "val": fingerprint(val)}
        run = Run(directory, prints, ranks=ranks)
        stack.enter_context(run)
        run.restore(learner, warn)
        context, rows = model.context_length, learner.settings.batch_size
        ended = train(
            learner,
            Data(
                Batches(
                    ids,
                    context,
                    rows,
                    learner.settings.seed,
                    *among,
                    document_ids=learner.settings.document_mask,
                ),
                ValidationBatches(val, context, rows, *among),
                bytes_per_id=torch.ones(model.vocab_size, dtype=torch.int64),
            ),
            run,
            throughput=make_throughput(model, rows * context, learner.device),
            **more,
        )
    return ended, learner


def log_of(directory):
    """Read a run's log without what a wall clock says."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "clock"} for line in lines]


def state_of(learner):
    return {**learner.model_tensors(), **learner.training_state()}


def assert_same_state(one, other):
    a, b = state_of(one), state_of(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
