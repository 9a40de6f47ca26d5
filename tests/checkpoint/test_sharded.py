"""A checkpoint does not say how many ranks wrote it, is there whole or not, and trusts nobody."""

import copy
import errno
import hashlib
import json
import math
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from checkpoint.ranks import Vanished, cut_all, with_ranks
from rewriting import rewrite
from scratchlm import ModelConfig, TransformerLM, load_model
from scratchlm import checkpoint as ckpt
from scratchlm.checkpoint import (
    MODEL,
    TRAINING_STATE,
    Piece,
    checkpoint_path,
    iter_tensors,
    newest_valid,
    open_tensors,
    read_manifest,
    read_piece,
    read_tensors,
    tensor_shapes,
    verify_checkpoint,
    write_checkpoint,
    write_sharded,
)
from scratchlm.checkpoint.pieces import join, parse_table
from scratchlm.cli import app
from scratchlm.errors import ScratchLMError

CONFIG = ModelConfig(vocab_size=11, context_length=8, d_model=8, num_layers=2, num_heads=2)
STATE = {
    "optimizer.m": torch.arange(15.0).view(5, 3).bfloat16(),
    "experts": torch.arange(60.0).view(3, 5, 4),
    "step": torch.tensor(3),
    "flags": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return dict(TransformerLM(CONFIG).state_dict())


def write(run, weights, size, step=2, pieces_of=cut_all, **more):
    """Write a checkpoint with `size` ranks; return what each gave or raised."""

    def work(exchange):
        return write_sharded(
            checkpoint_path(run, step),
            exchange=exchange,
            model=pieces_of(weights, exchange.rank, size),
            training_state=cut_all(STATE, exchange.rank, size),
            config=CONFIG,
            **more,
        )

    return with_ranks(size, work)


@pytest.fixture(scope="module")
def good(tmp_path_factory, weights):
    run = tmp_path_factory.mktemp("good")
    (path, *_) = write(run, weights, 3, metadata={"loss": 1.5})
    return path


def digest(tensors):
    """Hash names, dtypes, shapes and values."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + bytes(flat.numpy()))
    return whole.hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_n_ranks_wrote_is_what_one_wrote(tmp_path, weights, size):
    path = checkpoint_path(tmp_path, 2)
    assert write(tmp_path, weights, size, metadata={"loss": 1.5}) == [path] * size
    manifest = verify_checkpoint(path)
    assert manifest["metadata"] == {"loss": 1.5}
    assert manifest["step"] == 2
    assert {*manifest["files"], "manifest.json"} == {*os.listdir(path)}
    assert len(os.listdir(path)) == 2 * size + 2
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"]
    assert newest_valid(tmp_path) == path
    assert digest(read_tensors(path)) == digest(weights)
    assert digest(dict(iter_tensors(path, file=TRAINING_STATE))) == digest(STATE)
    assert tensor_shapes(path) == {name: tuple(one.shape) for name, one in weights.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_a_box_is_the_slice_whoever_wrote_the_tensor(tmp_path, weights, size):
    (path, *_) = write(tmp_path, weights, size)
    chance = torch.Generator().manual_seed(0)
    for file, tensors in ((MODEL, weights), (TRAINING_STATE, STATE)):
        with open_tensors(path, file) as opened:
            for name, tensor in tensors.items():
                for _ in range(8):
                    ends = [
                        sorted(torch.randint(0, n + 1, (2,), generator=chance).tolist())
                        for n in tensor.shape
                    ]
                    begin, lengths = [a for a, _ in ends], [b - a for a, b in ends]
                    box = opened.read(name, begin, lengths)
                    assert torch.equal(box, tensor[tuple(slice(a, b) for a, b in ends)])
                    assert box.dtype == tensor.dtype
    one = read_piece(path, "experts", (1, 2, 0), (2, 3, 1), file=TRAINING_STATE)
    assert torch.equal(one, STATE["experts"][1:3, 2:5, 0:1])
    for at, n in (((0, 0, 4), (1, 1, 1)), ((0, 0), (1, 1)), ((-1, 0, 0), (1, 1, 1))):
        with pytest.raises(ScratchLMError, match=r"'experts': a box at .* is not inside"):
            read_piece(path, "experts", at, n, file=TRAINING_STATE)
    with pytest.raises(ScratchLMError, match="no tensor 'other'"):
        read_piece(path, "other", (0,), (1,))


def test_reading_a_box_opens_only_the_shards_it_lies_in(tmp_path, good):
    path = shutil.copytree(good, tmp_path / "step-00000002")
    for shard in (1, 3):
        (path / f"model-0000{shard}-of-00003.safetensors").unlink()
    whole = read_tensors(good)["token_embeddings.weight"]  # cut by rows: 4, 4 and 3
    box = read_piece(path, "token_embeddings.weight", (5, 0), (2, 8))
    assert torch.equal(box, whole[5:7])
    with pytest.raises(ScratchLMError, match=r"model-00003-of-00003\.safetensors: no such file"):
        read_piece(path, "token_embeddings.weight", (5, 0), (4, 8))


def test_a_flipped_byte_of_any_shard_is_seen(tmp_path, good):
    path = shutil.copytree(good, tmp_path / "step-00000002")
    for file in path.iterdir():
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 9)):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            rewrite(file, damaged)
            with pytest.raises(ScratchLMError, match=file.name):
                verify_checkpoint(path)
        file.unlink()
        with pytest.raises(ScratchLMError, match=file.name):
            verify_checkpoint(path)
        file.write_bytes(whole)
    verify_checkpoint(path)


# All ranks or none


def all_the_same(ended, reason):
    assert len({str(error) for error in ended}) == 1
    assert all(type(error) is ScratchLMError for error in ended)
    assert str(ended[0]).endswith(f"step-00000002: the checkpoint could not be written: {reason}")


@pytest.mark.parametrize("nth", range(1, 13))
def test_a_full_disk_at_any_file_stops_all_ranks_with_one_line_and_nothing_stays(
    tmp_path, weights, monkeypatch, nth
):
    (old, *_) = write(tmp_path, weights, 2, step=1)
    real, calls, failed = os.fsync, [], []

    def fsync(fd):
        calls.append(fd)
        if len(calls) == nth:
            failed.append(os.readlink(f"/proc/self/fd/{fd}"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    ended = write(tmp_path, weights, 3, tokenizer_file=b"{}")
    monkeypatch.undo()
    if nth > 11:  # 2 files of each rank, 3 of rank 0, its directory and that one's
        assert not failed
        return
    rank = next((r for r in range(3) if f"-0000{r + 1}-of" in failed[0]), 0)
    all_the_same(ended, f"rank {rank}: No space left on device")
    verify_checkpoint(old)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    write(tmp_path, weights, 3)  # and the next attempt finds its place free
    assert digest(read_tensors(checkpoint_path(tmp_path, 2))) == digest(weights)


def test_a_bug_on_one_rank_shows_its_traceback_there_and_stops_the_others(tmp_path, weights):
    broken = {"t": ["no piece"]}

    def pieces(tensors, rank, size):
        return broken if rank == 1 else cut_all(tensors, rank, size)

    ended = write(tmp_path, weights, 3, pieces_of=pieces)
    assert isinstance(ended.pop(1), AttributeError)
    all_the_same(ended, "rank 1: AttributeError: 'str' object has no attribute 'tensor'")
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("stage", ["pieces", "shards", "manifest"])
@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_vanishes_leaves_nothing_half_done(tmp_path, weights, stage, who):
    def work(exchange):
        real = exchange.gather

        def gather(key, value):
            if exchange.rank == who and key.endswith(stage):
                raise Vanished
            return real(key, value)

        exchange.gather = gather
        return write_sharded(
            checkpoint_path(tmp_path, 2),
            exchange=exchange,
            model=cut_all(weights, exchange.rank, 3),
            training_state=None,
            config=CONFIG,
        )

    ended = with_ranks(3, work)
    assert isinstance(ended.pop(who), Vanished)
    assert [str(error) for error in ended] == ["a rank did not answer"] * 2
    left = os.listdir(tmp_path / "checkpoints")
    if stage == "manifest" and left:  # all had written theirs: rank 0 may have come to the end
        assert left == ["step-00000002"]
        verify_checkpoint(checkpoint_path(tmp_path, 2))
    else:
        assert left == []


def test_a_whole_checkpoint_is_never_overwritten_and_a_damaged_one_is_replaced(tmp_path, weights):
    (path, *_) = write(tmp_path, weights, 2)
    ended = write(tmp_path, weights, 3)
    all_the_same(ended, f"rank 0: {path} exists already; a checkpoint is never overwritten")
    (path / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert write(tmp_path, weights, 3) == [path] * 3
    assert digest(read_tensors(path)) == digest(weights)


WRONG_PIECES = {
    "uncovered": (
        lambda t, r: [Piece((4, 2), (2 * r, 0), t[2 * r : 2 * r + 2 - r])],
        "tensor 't': its pieces must hold each of 8 elements once; they hold 6",
    ),
    "covered twice": (
        lambda t, r: [Piece.whole(t)],
        "tensor 't': its pieces must hold each of 8 elements once; they hold 16",
    ),
    "covered twice and uncovered": (
        lambda t, r: [Piece((4, 2), (r, 0), t[r : r + 2])],
        "tensor 't': its pieces overlap, and leave as many elements out",
    ),
    "outside": (
        lambda t, r: [Piece((4, 2), (3 * r, 0), t[:2])],
        "tensor 't': a box at [3, 0] of [2, 2] is not inside [4, 2]",
    ),
    "another dtype": (
        lambda t, r: [Piece((4, 2), (2 * r, 0), t[:2].bfloat16() if r else t[:2])],
        "'t': one piece is of F32 [4, 2], another of BF16 [4, 2]",
    ),
    "another shape": (
        lambda t, r: [Piece((4 + r, 2), (2 * r, 0), t[:2])],
        "'t': one piece is of F32 [4, 2], another of F32 [5, 2]",
    ),
    "a dtype we cannot store": (
        lambda t, r: [Piece((4, 2), (2 * r, 0), t[:2].cfloat() if r else t[:2])],
        "rank 1: 't': torch.complex64 cannot be stored",
    ),
}


@pytest.mark.parametrize("name", WRONG_PIECES)
def test_pieces_that_do_not_make_up_their_tensor_are_refused_on_all_ranks(tmp_path, name):
    pieces, message = WRONG_PIECES[name]
    tensor = torch.arange(8.0).view(4, 2)
    ended = write(tmp_path, {}, 2, pieces_of=lambda _, rank, size: {"t": pieces(tensor, rank)})
    all_the_same(ended, message)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_two_pieces_under_one_key_are_refused(tmp_path):
    def pieces(_, rank, size):
        half = Piece((4,), (2 * rank,), torch.ones(2))
        return {"t": [half], "t[0]": [] if rank else [Piece.whole(torch.ones(1))]}

    ended = write(tmp_path, {}, 2, pieces_of=pieces)
    all_the_same(ended, "model-00001-of-00002.safetensors: 't[0]' stands for two pieces")


def test_a_training_state_is_that_of_all_ranks_or_of_none(tmp_path, weights):
    def work(exchange):
        return write_sharded(
            checkpoint_path(tmp_path, 2),
            exchange=exchange,
            model=cut_all(weights, exchange.rank, 2),
            training_state=None if exchange.rank else cut_all(STATE, 0, 2),
            config=CONFIG,
        )

    ended = with_ranks(2, work)
    all_the_same(ended, "rank 1 and rank 0 must both have a training state")


def test_one_rank_alone_must_hold_every_element_too(tmp_path):
    half = {"t": [Piece((4, 2), (0, 0), torch.ones(2, 2))]}
    (error,) = write(tmp_path, {}, 1, pieces_of=lambda *_: half)
    all_the_same([error], "tensor 't': its pieces must hold each of 8 elements once; they hold 4")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_boxes_are_taken_if_and_only_if_they_cover_every_element_once(boxes):
    """Against counting, element by element."""
    counts = torch.zeros(3, 4)
    for i, j, n, m in boxes:
        counts[i : i + n, j : j + m] += 1
    inside = all(i + n <= 3 and j + m <= 4 for i, j, n, m in boxes)
    rows = [[[i, j], [n, m]] for i, j, n, m in boxes]
    table = join([{"t": {"dtype": "F32", "shape": [3, 4], "boxes": rows}}])
    try:
        taken = bool(parse_table(table, MODEL, 1))
    except ScratchLMError:
        taken = False
    assert taken == (inside and bool((counts == 1).all()))


# Nobody's manifest is trusted


def first_box(manifest, name="token_embeddings.weight"):
    return manifest["pieces"][MODEL][name]["boxes"][0]


def tensor_of(manifest):
    return manifest["pieces"][MODEL]["token_embeddings.weight"]


MANIFESTS = {
    "no pieces": lambda m: m.pop("pieces"),
    "pieces a list": lambda m: m.update(pieces=[]),
    "no model": lambda m: m["pieces"].pop(MODEL),
    "another table": lambda m: m["pieces"].update(other={}),
    "a table of text": lambda m: m["pieces"].update({MODEL: "all"}),
    "no shards": lambda m: m.pop("shards"),
    "shards of text": lambda m: m.update(shards="3"),
    "no shard": lambda m: m.update(shards=0),
    "a shard too many": lambda m: m.update(shards=4),
    "a million shards": lambda m: m.update(shards=10**6),
    "a file not named": lambda m: m["files"].pop("model-00002-of-00003.safetensors"),
    "a file's size": lambda m: m["files"]["model-00001-of-00003.safetensors"].update(size=9),
    "a tensor of text": lambda m: m["pieces"][MODEL].update({"ln_final.weight": "x"}),
    "no dtype": lambda m: tensor_of(m).pop("dtype"),
    "a word more": lambda m: tensor_of(m).update(more=1),
    "dtype of nobody": lambda m: tensor_of(m).update(dtype="F7"),
    "dtype a list": lambda m: tensor_of(m).update(dtype=["F32"]),
    "another dtype": lambda m: tensor_of(m).update(dtype="BF16"),
    "shape of text": lambda m: tensor_of(m).update(shape="big"),
    "shape negative": lambda m: tensor_of(m).update(shape=[-11, 8]),
    "shape of truth": lambda m: tensor_of(m).update(shape=[11, True]),
    "shape of terabytes": lambda m: tensor_of(m).update(shape=[2**40, 2**40]),
    "nothing of terabytes": lambda m: tensor_of(m).update(shape=[0, 2**62], boxes=[]),
    "many dimensions": lambda m: tensor_of(m).update(shape=[1] * 40, boxes=[]),
    "a box of terabytes": lambda m: tensor_of(m).update(
        shape=[2**40, 8], boxes=[[1, [0, 0], [2**40, 8]]]
    ),
    "boxes a table": lambda m: tensor_of(m).update(boxes={}),
    "no boxes": lambda m: tensor_of(m).update(boxes=[]),
    "a box missing": lambda m: tensor_of(m)["boxes"].pop(),
    "a box twice": lambda m: tensor_of(m)["boxes"].append(first_box(m)),
    "a box of text": lambda m: tensor_of(m)["boxes"].append("box"),
    "a box too short": lambda m: first_box(m).pop(),
    "a shard of text": lambda m: first_box(m).__setitem__(0, "1"),
    "shard 0": lambda m: first_box(m).__setitem__(0, 0),
    "shard 4": lambda m: first_box(m).__setitem__(0, 4),
    "another shard": lambda m: first_box(m).__setitem__(0, 2),
    "offsets of text": lambda m: first_box(m).__setitem__(1, "00"),
    "offsets negative": lambda m: first_box(m).__setitem__(1, [-1, 0]),
    "offsets fractional": lambda m: first_box(m).__setitem__(1, [0.0, 0]),
    "an offset too few": lambda m: first_box(m).__setitem__(1, [0]),
    "outside": lambda m: first_box(m).__setitem__(1, [9, 0]),
    "overlapping": lambda m: first_box(m).__setitem__(1, [1, 0]),
    "length 0": lambda m: first_box(m).__setitem__(2, [0, 8]),
    "a length too long": lambda m: first_box(m).__setitem__(2, [5, 8]),
    "a key not there": lambda m: m["pieces"][MODEL].update(
        {"token_embeddings.weight": {"dtype": "F32", "shape": [4], "boxes": [[1, [0], [4]]]}}
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_pieces_that_we_did_not_write_are_one_line_and_take_no_memory(
    good, tmp_path, name, monkeypatch
):
    path = tmp_path / "step-00000002"
    path.mkdir()
    for file in good.iterdir():
        os.link(file, path / file.name)
    manifest = copy.deepcopy(read_manifest(good))
    MANIFESTS[name](manifest)
    manifest["sha256"] = ckpt.manifest_digest(manifest)
    (path / ckpt.MANIFEST).unlink()
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))

    def empty(*size, **kwargs):
        assert math.prod(size if isinstance(size[0], int) else size[0]) < 1000, "memory is taken"
        return real(*size, **kwargs)

    real = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    for read in (load_model, read_tensors):
        with pytest.raises(ScratchLMError, match="step-00000002") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_file_whose_tensor_is_not_the_piece_is_refused(good, tmp_path):
    path = shutil.copytree(good, tmp_path / "step-00000002")
    ckpt.write_tensors(tmp_path / "x", {"token_embeddings.weight[4,0]": torch.ones(3, 8)})
    os.replace(tmp_path / "x", path / "model-00002-of-00003.safetensors")
    with pytest.raises(ScratchLMError, match=r"00002-of-00003.* must be F32 \[4, 8\]; got F32 \[3"):
        read_piece(path, "token_embeddings.weight", (0, 0), (11, 8))


def test_a_version_that_knows_no_shards_refuses_them_by_number(good):
    """Versions before this one read `version` first, and take 1 alone."""
    assert json.loads((good / "manifest.json").read_text())["version"] == 2
    assert not (good / "model.safetensors").exists()


# Readers


def test_a_model_is_loaded_and_exported_as_if_one_had_written_it(tmp_path, weights, good):
    one = write_checkpoint(checkpoint_path(tmp_path, 2), model=weights, config=CONFIG)
    ours, theirs = (load_model(path).model.state_dict() for path in (good, one))
    assert digest(ours) == digest(theirs)
    for out in ("hf", "m.gguf"):
        made = []
        for path in (good, one):
            place = tmp_path / path.parts[-3] / out
            place.parent.mkdir(exist_ok=True)
            done = CliRunner().invoke(app, ["export", str(path), str(place)])
            assert done.exit_code == 0, done.output
            file = place / "model.safetensors" if out == "hf" else place
            made.append(file.read_bytes())
        assert made[0] == made[1]
