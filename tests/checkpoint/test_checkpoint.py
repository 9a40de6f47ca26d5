"""A checkpoint is whole or it is not there, and damage of any kind is seen."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from faults.dying import die_at, end_within, fork
from rewriting import rewrite
from scratchlm import ModelConfig, TransformerLM
from scratchlm import checkpoint as ckpt
from scratchlm.checkpoint import (
    checkpoint_path,
    clean_leftovers,
    find_checkpoints,
    is_checkpoint,
    newest_valid,
    prune_checkpoints,
    read_config,
    read_manifest,
    read_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from scratchlm.errors import ScratchLMError

CONFIG = ModelConfig(vocab_size=11, context_length=8, d_model=8, num_layers=2, num_heads=2)
STATE = {"optimizer.m": torch.arange(6.0).view(2, 3), "step": torch.tensor(3.0)}


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return dict(TransformerLM(CONFIG).state_dict())


def write(run, step, weights, **more):
    return write_checkpoint(checkpoint_path(run, step), model=weights, config=CONFIG, **more)


def test_what_is_written_comes_back_bit_for_bit(tmp_path, weights):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"some": "tokenizer"}')
    path = write(
        tmp_path,
        500,
        weights,
        training_state=STATE,
        tokenizer_file=tokenizer,
        metadata={"loss": 1.5, "name": "größe"},
    )
    assert path == tmp_path / "checkpoints" / "step-00000500"
    assert is_checkpoint(path)
    assert read_config(path) == CONFIG
    for name, tensor in read_tensors(path).items():
        assert torch.equal(tensor, weights[name])
    assert read_tensors(path).keys() == weights.keys()
    state = read_tensors(path, file="training_state.safetensors")
    assert torch.equal(state["optimizer.m"], STATE["optimizer.m"])
    assert state["step"].shape == ()
    assert (path / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    manifest = verify_checkpoint(path)
    assert manifest["metadata"] == {"loss": 1.5, "name": "größe"}
    assert manifest["step"] == 500
    assert set(manifest["files"]) | {"manifest.json"} == set(os.listdir(path))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtypes=st.lists(st.sampled_from(sorted(ckpt.DTYPES, key=str)), min_size=6, max_size=6),
)
def test_our_safetensors_are_what_the_library_reads(tmp_path_factory, shapes, dtypes):
    directory = tmp_path_factory.mktemp("tensors")
    tensors = {
        f"tensor {i} é": torch.randn(shape).mul(3).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    ckpt.write_tensors(directory / "ours.safetensors", tensors)
    read = load_file(directory / "ours.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    save_file(tensors, directory / "theirs.safetensors")
    sizes = [os.path.getsize(directory / f"{who}.safetensors") for who in ("ours", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 256  # the same layout; only the header's text may differ


def test_a_transposed_weight_is_written_in_its_own_order(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).T
    ckpt.write_tensors(tmp_path / "t.safetensors", {"t": tensor})
    assert torch.equal(load_file(tmp_path / "t.safetensors")["t"], tensor)


def test_every_flipped_byte_is_seen(tmp_path, weights):
    path = write(tmp_path, 1, weights, training_state=STATE)
    for file in path.iterdir():
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 25)):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            rewrite(file, damaged)
            with pytest.raises(ScratchLMError, match=file.name):
                verify_checkpoint(path)
        file.write_bytes(whole[:-2])
        with pytest.raises(ScratchLMError, match=file.name):
            verify_checkpoint(path)
        file.unlink()
        with pytest.raises(ScratchLMError, match=file.name):
            verify_checkpoint(path)
        file.write_bytes(whole)
    verify_checkpoint(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"version": 1}', "\xff"])
def test_a_manifest_of_nonsense_is_one_line(tmp_path, weights, text):
    path = write(tmp_path, 1, weights)
    (path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ScratchLMError, match=r"manifest\.json"):
        verify_checkpoint(path)


def test_a_manifest_cannot_point_outside(tmp_path, weights):
    path = write(tmp_path, 1, weights)
    manifest = read_manifest(path)
    manifest["files"]["../../secret"] = {"size": 0, "sha256": ""}
    manifest["sha256"] = ckpt.manifest_digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ScratchLMError, match=r"manifest\.json"):
        verify_checkpoint(path)


def test_a_newer_format_is_named(tmp_path, weights):
    path = write(tmp_path, 1, weights)
    manifest = read_manifest(path) | {"version": 3}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ScratchLMError, match="format version 3 is not 1 or 2"):
        verify_checkpoint(path)


def test_checkpoints_are_found_by_step_not_by_name_or_time(tmp_path, weights):
    for step in (100_000_000, 5, 99_999_999, 10):
        write(tmp_path, step, weights)
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "step-00000011").write_text("a file")
    assert [ckpt.step_of(p) for p in find_checkpoints(tmp_path)] == [
        5,
        10,
        99_999_999,
        100_000_000,
    ]
    assert find_checkpoints(tmp_path / "nothing") == []


def test_a_damaged_newest_gives_way_to_the_one_before_with_a_warning(tmp_path, weights):
    old, new = write(tmp_path, 1, weights), write(tmp_path, 2, weights)
    assert newest_valid(tmp_path) == new
    (new / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step-00000002/model\.safetensors is damaged"):
        assert newest_valid(tmp_path) == old
    said = []
    assert newest_valid(tmp_path, said.append) == old
    assert len(said) == 1
    shutil.rmtree(old)
    with pytest.raises(ScratchLMError, match="all 1 checkpoints are damaged"):
        newest_valid(tmp_path, said.append)
    shutil.rmtree(new)
    assert newest_valid(tmp_path) is None


def test_a_whole_checkpoint_is_never_overwritten_and_a_damaged_one_is_replaced(tmp_path, weights):
    path = write(tmp_path, 1, weights)
    with pytest.raises(ScratchLMError, match="never overwritten"):
        write(tmp_path, 1, weights)
    (path / "config.json").write_text("")
    write(tmp_path, 1, weights)
    verify_checkpoint(path)


def test_pruning_keeps_the_last_and_the_named(tmp_path, weights):
    for step in range(1, 7):
        write(tmp_path, step, weights)
    prune_checkpoints(tmp_path, keep_last=2, keep_steps=[3])
    assert [ckpt.step_of(p) for p in find_checkpoints(tmp_path)] == [3, 5, 6]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "step-00000003",
        "step-00000005",
        "step-00000006",
    ]
    with pytest.raises(ValueError, match="keep_last"):
        prune_checkpoints(tmp_path, keep_last=0)


def test_checkpoints_of_a_future_that_is_left_are_set_aside_until_a_new_one_stands(
    tmp_path, weights
):
    for step in (1, 2, 3):
        write(tmp_path, step, weights)
    ckpt.set_aside_after(tmp_path, 1)
    assert [ckpt.step_of(p) for p in find_checkpoints(tmp_path)] == [1]
    assert len(os.listdir(tmp_path / "checkpoints")) == 3
    clean_leftovers(tmp_path)
    assert len(os.listdir(tmp_path / "checkpoints")) == 3
    write(tmp_path, 2, weights)
    ckpt.remove_damaged(tmp_path)
    assert len(os.listdir(tmp_path / "checkpoints")) == 2


# What the writer asks of the system, in order: each is a moment at which a kill may come.
CALLS = ("open", "fsync", "rename", "mkdir", "close")


def test_a_kill_at_any_moment_of_a_write_leaves_whole_checkpoints_only(tmp_path, weights):
    first = write(tmp_path, 1, weights, training_state=STATE)
    kills = 0
    for moment in range(1, 200):

        def work(moment=moment):
            die_at(moment, *CALLS, every=True)
            write(tmp_path, 2, weights, training_state=STATE)
            prune_checkpoints(tmp_path, keep_last=1)

        ended = end_within(fork(work), 1e9)
        found = find_checkpoints(tmp_path)
        assert found
        for path in found:
            verify_checkpoint(path)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        clean_leftovers(tmp_path)
        assert all(name.startswith("step-") for name in os.listdir(tmp_path / "checkpoints"))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002", ignore_errors=True)
        if not first.exists():
            write(tmp_path, 1, weights, training_state=STATE)
    assert ended == 0
    assert kills > 15


def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint_whole(tmp_path, weights):
    """RLIMIT_FSIZE makes the kernel itself refuse to let a file grow."""
    old = write(tmp_path, 1, weights)

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(ScratchLMError, match="could not be written: File too large"):
            write(tmp_path, 2, weights)
        os._exit(7)

    assert end_within(fork(work), 1e9) == 7
    verify_checkpoint(old)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


@pytest.mark.parametrize("nth", range(1, 6))
def test_no_space_at_any_file_is_one_line_and_nothing_stays_behind(
    tmp_path, weights, monkeypatch, nth
):
    old = write(tmp_path, 1, weights)
    real, calls = os.fsync, 0

    def fsync(fd):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ScratchLMError, match="could not be written: No space left on device"):
        write(tmp_path, 2, weights, training_state=STATE)
    verify_checkpoint(old)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_directory_one_may_not_write_is_one_line(tmp_path, weights):
    old = write(tmp_path, 1, weights)
    for directory in (*tmp_path.parents, tmp_path):
        if str(directory).startswith("/tmp/"):
            os.chmod(directory, 0o755)
    os.chmod(tmp_path / "checkpoints", 0o555)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write anywhere
        with pytest.raises(ScratchLMError, match="could not be written: Permission denied"):
            write(tmp_path, 2, weights)
        os._exit(7)

    try:
        assert end_within(fork(work), 1e9) == 7
    finally:
        os.chmod(tmp_path / "checkpoints", 0o755)
    verify_checkpoint(old)
