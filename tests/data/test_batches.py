"""Batches are a pure function of (seed, step, rank) in which every id is a target once an epoch."""

import gc
import os
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.oracles import naive_row
from scratchlm.data import IGNORE_INDEX, Batches, TokenFile, ValidationBatches, write_token_file
from scratchlm.errors import ScratchLMError

EOT = 0
FROZEN_INPUTS = [[701, 702, 703, 704, 705, 706], [377, 378, 379, 380, 381, 382]]


@pytest.fixture
def make_file(tmp_path):
    """Write ids as a token file and open it; every id names its own position unless given."""
    made = []

    def make(ids, eot=None, vocab_size=70_000):
        path = tmp_path / f"tokens{len(made)}"
        write_token_file(path, ids, vocab_size=vocab_size, tokenizer="t", end_of_text=eot)
        made.append(TokenFile(path))
        return made[-1]

    yield make
    for file in made:
        file.close()


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


def open_ids(directory, ids, eot=None):
    write_token_file(directory / "x", ids, vocab_size=70_000, tokenizer="t", end_of_text=eot)
    return TokenFile(directory / "x")


def live_targets(batch):
    return [t for t in batch.targets.flatten().tolist() if t != IGNORE_INDEX]


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(2, 400),
    context=st.integers(1, 50),
    rows=st.integers(1, 6),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    ends=st.booleans(),
)
def test_every_id_is_a_target_once_per_epoch(shared_dir, count, context, rows, ranks, seed, ends):
    ids = [*range(1, count), EOT] if ends else list(range(1, count + 1))
    expected = Counter(ids if ends else ids[1:])  # without an end, nothing precedes the first id
    with open_ids(shared_dir, ids, EOT if ends else None) as tokens:
        per_rank = [Batches(tokens, context, rows * ranks, seed, r, ranks) for r in range(ranks)]
        epochs = 2
        windows = per_rank[0].num_windows
        seen = []  # rows in global order
        for step in range(-(-epochs * windows // (rows * ranks))):
            for batches in per_rank:
                batch = batches.batch(step)
                assert batch.inputs.shape == batch.targets.shape == (rows, context)
                seen += batch.targets.tolist()
    for epoch in range(epochs):
        targets = Counter(
            t
            for row in seen[epoch * windows : (epoch + 1) * windows]
            for t in row
            if t != IGNORE_INDEX
        )
        assert targets == expected


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(2, 300),
    context=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 10**6),
    ends=st.booleans(),
)
def test_a_second_plain_implementation_gives_the_same_batch(
    shared_dir, count, context, seed, step, ends
):
    ids = [(i * 7919) % 65_000 + 1 for i in range(count)]
    if ends:
        ids[-1] = EOT
    with open_ids(shared_dir, ids, EOT) as tokens:
        batch = Batches(tokens, context, 3, seed).batch(step)
    for row in range(3):
        inputs, targets = naive_row(ids, EOT, context, seed, step * 3 + row)
        assert batch.inputs[row].tolist() == inputs
        assert batch.targets[row].tolist() == targets


@pytest.mark.parametrize("g", [0, 4093, 4095, 4096, 8190, 9996, 9999, 10_000, 14_094])
def test_the_order_computed_in_blocks_equals_the_naive_one(make_file, g):
    ids = [i % 60_000 for i in range(30_001)]  # 10,000 windows of 3
    batches = Batches(make_file(ids), 3, 1, seed=77)
    eight_rows = Batches(make_file(ids), 3, 8, seed=77).batch(g // 8)
    assert batches.batch(g).inputs[0].tolist() == naive_row(ids, None, 3, 77, g)[0]
    for row in range(8):
        expected = naive_row(ids, None, 3, 77, g // 8 * 8 + row)
        assert (eight_rows.inputs[row].tolist(), eight_rows.targets[row].tolist()) == expected


def test_the_batch_is_the_same_as_in_earlier_versions(make_file):
    # Written down once from the plain implementation: another machine must see these very ids.
    batch = Batches(make_file(range(1000)), 6, 2, seed=42).batch(123)
    assert batch.inputs.tolist() == FROZEN_INPUTS
    assert batch.targets.tolist() == [[i + 1 for i in row] for row in FROZEN_INPUTS]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 12])
@pytest.mark.parametrize("step", [0, 5, 1000])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(make_file, ranks, step):
    tokens = make_file(range(5000))
    whole = Batches(tokens, 16, 12, seed=9).batch(step)
    shares = [Batches(tokens, 16, 12, 9, rank, ranks).batch(step) for rank in range(ranks)]
    assert torch.equal(torch.cat([share.inputs for share in shares]), whole.inputs)
    assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)


def test_targets_are_the_inputs_shifted_by_one(make_file):
    batch = Batches(make_file(range(10_000)), 32, 8, seed=1).batch(3)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_another_seed_or_epoch_gives_another_order_and_other_cuts(make_file):
    tokens = make_file(range(6401))

    def epoch_starts(seed, epoch):
        batches = Batches(tokens, 64, 100, seed)
        return batches.batch(epoch).inputs[:, 0].tolist()

    first, second, other = epoch_starts(0, 0), epoch_starts(0, 1), epoch_starts(1, 0)
    assert first != second
    assert first != other
    assert sorted(first) != sorted(second)  # the cuts moved, not only the order


def test_any_step_is_the_same_read_alone_or_in_sequence(make_file):
    batches = Batches(make_file(range(3000)), 16, 4, seed=3)
    in_sequence = [batch.inputs for batch in batches.iterate(10, 30)]
    assert len(in_sequence) == 20
    for step, inputs in enumerate(in_sequence, start=10):
        assert torch.equal(inputs, batches.batch(step).inputs)


# ---- documents


def test_document_ids_change_at_the_end_of_text_input_and_no_target_is_lost(make_file):
    ids = [5, 6, EOT, 7, EOT, 8, 9, 10, EOT]
    validation = ValidationBatches(make_file(ids, EOT), 9, 1, document_ids=True)
    batch = validation.batch(0)
    assert batch.inputs[0].tolist() == ids
    assert batch.targets[0].tolist() == [6, EOT, 7, EOT, 8, 9, 10, EOT, 5]
    # the end-of-text id is the target that closes a document and the input that opens the next
    assert batch.document_ids[0].tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert batch.num_targets() == 9


def test_a_target_never_needs_another_document(make_file):
    rng = np.random.default_rng(0)
    documents = [[d * 20 + k + 1 for k in range(rng.integers(1, 19))] for d in range(60)]
    ids = [i for document in documents for i in [*document, EOT]]
    batches = Batches(make_file(ids, EOT), 32, 8, seed=5, document_ids=True)
    for step in range(20):
        batch = batches.batch(step)
        columns = (batch.inputs, batch.targets, batch.document_ids)
        for inputs, targets, numbers in zip(*(c.tolist() for c in columns), strict=True):
            for j, target in enumerate(targets):
                visible = [inputs[k] for k in range(j + 1) if numbers[k] == numbers[j]]
                owners = {(i - 1) // 20 for i in visible if i != EOT}
                if target not in (EOT, IGNORE_INDEX):
                    owners.add((target - 1) // 20)
                assert len(owners) <= 1


def test_wrapping_around_a_file_without_end_of_text_starts_a_new_document(make_file):
    tokens = make_file(range(1, 12), EOT)  # declares an end-of-text id but does not end with it
    batches = Batches(tokens, 4, 1, seed=0, document_ids=True)
    crossings = 0
    for step in range(60):
        batch = batches.batch(step)
        inputs, numbers = batch.inputs[0].tolist(), batch.document_ids[0].tolist()
        for j in range(1, 4):
            jumped = inputs[j] != inputs[j - 1] + 1
            crossings += jumped
            assert (numbers[j] != numbers[j - 1]) == jumped
    assert crossings > 5


def test_without_document_ids_the_batch_has_none(make_file):
    assert Batches(make_file(range(100)), 4, 1, seed=0).batch(0).document_ids is None


# ---- validation


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(2, 300),
    context=st.integers(1, 400),
    rows=st.integers(1, 5),
    ranks=st.integers(1, 3),
    ends=st.booleans(),
)
def test_validation_sees_every_id_once_in_order(shared_dir, count, context, rows, ranks, ends):
    ids = [*range(1, count), EOT] if ends else list(range(1, count + 1))
    with open_ids(shared_dir, ids, EOT) as tokens:
        parts = [ValidationBatches(tokens, context, rows * ranks, r, ranks) for r in range(ranks)]
        seen = []
        for step in range(len(parts[0])):
            for part in parts:
                batch = part.batch(step)
                assert batch.inputs.shape == (rows, context)
                seen += live_targets(batch)
    assert seen == ids[1:] + ([ids[0]] if ends else [])


def test_validation_iterates_over_all_of_its_batches_the_same_way_each_time(make_file):
    validation = ValidationBatches(make_file(range(1000)), 16, 4)
    first, second = list(validation), list(validation)
    assert len(first) == len(validation)
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(first, second, strict=True))
    with pytest.raises(IndexError, match="below 16"):
        validation.batch(16)


# ---- reading ahead


def test_a_truncation_while_prefetching_is_raised_at_its_step(make_file):
    tokens = make_file(range(60_000))
    batches = Batches(tokens, 64, 8, seed=0)
    iterator = batches.iterate(0, 200)
    next(iterator)
    os.truncate(tokens.path, 1000)
    with pytest.raises(ScratchLMError, match="truncated while in use"):
        list(iterator)
    assert not prefetchers()


def prefetchers():
    return [t for t in threading.enumerate() if t.name == "scratchlm-prefetch"]


def test_closing_or_dropping_the_iterator_ends_its_thread(make_file):
    batches = Batches(make_file(range(1000)), 8, 2, seed=0)
    iterator = batches.iterate()
    next(iterator)
    assert prefetchers()
    iterator.close()
    assert not prefetchers()
    iterator = batches.iterate()
    next(iterator)
    del iterator
    gc.collect()
    assert not prefetchers()


def test_an_iterator_never_started_leaves_no_thread(make_file):
    iterator = Batches(make_file(range(1000)), 8, 2, seed=0).iterate()
    del iterator
    assert not prefetchers()


# ---- what a caller can get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_length": 0}, "context_length must be >= 1; got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1; got 0"),
        ({"batch_size": 3, "world_size": 4}, "batch_size=3, world_size=4"),
        ({"rank": 1}, "rank=1, world_size=1"),
        ({"seed": -1}, "seed must be in"),
        ({"document_ids": True}, "needs an end-of-text id"),
    ],
)
def test_bad_arguments_are_one_line(make_file, arguments, message):
    defaults = {"context_length": 4, "batch_size": 2, "seed": 0}
    with pytest.raises(ValueError, match=message) as caught:
        Batches(make_file(range(100)), **{**defaults, **arguments})
    assert "\n" not in str(caught.value)


def test_a_file_too_short_for_one_transition_is_refused(make_file):
    with pytest.raises(ValueError, match="at least 2 ids; got 1"):
        Batches(make_file([1]), 4, 1, seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_a_device_is_one_line(make_file):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        Batches(make_file(range(10)), 2, 1, seed=0, pin_memory=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_are_pinned(make_file):
    assert Batches(make_file(range(10)), 2, 1, 0, pin_memory=True).batch(0).inputs.is_pinned()
