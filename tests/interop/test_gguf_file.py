"""The GGUF container: what others write is read alike, and each broken rule is named."""

import gc
import os
import resource
import struct

import gguf
import numpy as np
import pytest
import torch

from interop.gguf_damage import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    join,
    key_bytes,
    mutations,
    split,
    tensor_bytes,
    text,
)
from rewriting import rewrite
from scratchlm import ModelConfig, TransformerLM
from scratchlm.errors import ScratchLMError
from scratchlm.interop import is_gguf, read_gguf, write_gguf
from scratchlm.interop.gguf_file import read_gguf_file
from scratchlm.tokenizer.chat_template import ChatTemplate
from tokenizer.texts import SPECIALS, prose_tokenizer

NAME = key_bytes("general.name", STRING, "x")
A = tensor_bytes("a", [8], 0, 0)  # 32 bytes
TINY = ModelConfig(vocab_size=6, context_length=8, d_model=4, num_layers=1, num_heads=2, d_ff=4)


def put(folder, data):
    rewrite(folder / "file.gguf", data)
    return folder / "file.gguf"


def one_line(error):
    line = str(error)
    assert line
    assert "\n" not in line
    assert len(line) < 1500
    line.encode("utf-8")


# Others


def test_a_file_of_the_gguf_package_is_read_as_it_was_written(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "file", "llama")
    writer.add_uint64("a.u64", 2**63)
    writer.add_int8("a.i8", -3)
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_array("a.texts", ["x", "größer"])
    writer.add_array("a.numbers", [1, -2, 3])
    tensors = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.ones((2, 2, 5), np.float16),
        "q8_0": gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
    }
    writer.add_tensor("f32", tensors["f32"])
    writer.add_tensor("f16", tensors["f16"])
    writer.add_tensor("q8_0", tensors["q8_0"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf_file(tmp_path / "file")
    expected = {"a.u64": 2**63, "a.i8": -3, "a.f64": 1e-300, "a.bool": True}
    assert file.metadata.items() >= {**expected, "general.architecture": "llama"}.items()
    assert file.metadata["a.texts"] == ["x", "größer"]
    assert file.metadata["a.numbers"].tolist() == [1, -2, 3]
    data = (tmp_path / "file").read_bytes()
    shapes = {"f32": (2, 3), "f16": (2, 2, 5), "q8_0": (3, 64)}
    for name, stored in file.tensors.items():
        assert stored.shape == shapes[name]
        assert data[stored.start : stored.start + stored.nbytes] == tensors[name].tobytes()


def test_the_gguf_package_reads_what_we_write(tmp_path):
    tokenizer = prose_tokenizer()
    config = ModelConfig(vocab_size=430, context_length=8, d_model=32, num_layers=1, num_heads=2)
    tensors = TransformerLM(config).state_dict()
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors, tokenizer, eos_token_ids=[tokenizer.special_tokens["<s>"]])
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("llama.block_count").contents() == 1
    words = reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(words) == 430
    assert words[tokenizer.special_tokens[SPECIALS[4]]] == "élan vital"
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(found) == len(tensors)
    assert np.array_equal(found["blk.0.ffn_up.weight"], tensors["layers.0.ffn.w3.weight"].numpy())


# One rule at a time


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short"),
        (b"GGU", "cut short"),
        (join([], [], b"", magic=b"GGML"), "does not begin with GGUF"),
        (join([], [], b"", version=1), "its version is 1"),
        (join([], [], b"", version=4), "its version is 4"),
        (join([], [], b"", version=3 << 24), "it is big endian"),
        (join([], [], b"", counts=(1, 0)), "cut short: 1 tensors"),
        (join([], [], b"", counts=(2**63, 0)), "at most 65,536 tensors"),
        (join([], [], b"", counts=(0, 2**40)), "at most 4,096 keys"),
        (join([], [], b"", counts=(0, 3)), "cut short: 3 keys"),
        (join([NAME, NAME], [], b""), "the key 'general.name' stands twice"),
        (join([key_bytes("", U8, 1) + bytes(8)], [], b""), "a key must not be empty"),
        (join([key_bytes("k" * 2000, U8, 1)], [], b""), "a key must not exceed"),
        (join([text("k") + struct.pack("<I", 13)], [], b""), "the type 13, which is none"),
        (join([text("k") + struct.pack("<IQ", STRING, 2**60)], [], b""), "must not exceed"),
        (join([text("k") + struct.pack("<IQ", STRING, 2**20)], [], b""), "cut short"),
        (join([key_bytes("k", STRING, b"\xff\xfe")], [], b""), "'k' is not UTF-8"),
        (join([text(b"\xff") + struct.pack("<IB", U8, 1)], [], b""), "a key is not UTF-8"),
        (join([text("k") + struct.pack("<IB", BOOL, 2)], [], b""), "must be true or false; got 2"),
        (join([key_bytes("k", ARRAY, (BOOL, [0, 3]))], [], b""), "true or false; got 3"),
        (
            join([key_bytes("k", ARRAY, (ARRAY, [(U8, [1])]))], [], b""),
            "an array of arrays",
        ),
        (join([text("k") + struct.pack("<IIQ", ARRAY, 13, 0)], [], b""), "items of type 13"),
        (join([text("k") + struct.pack("<IIQ", ARRAY, U64, 2**40)], [], b""), "at most"),
        (join([text("k") + struct.pack("<IIQ", ARRAY, U64, 2**20)], [], b""), "cut short"),
        (join([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**31)], [], b""), "at most"),
        (join([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**20)], [], b""), "cut short"),
        (join([key_bytes("general.alignment", U32, 0)], [], b""), "a power of 2"),
        (join([key_bytes("general.alignment", U32, 48)], [], b""), "a power of 2"),
        (join([key_bytes("general.alignment", U32, 2**31)], [], b""), "a power of 2"),
        (join([key_bytes("general.alignment", STRING, "32")], [], b""), "a power of 2"),
        (join([], [A, A], bytes(32)), "the tensor 'a' stands twice"),
        (join([], [tensor_bytes("a" * 64, [8], 0, 0)], bytes(32)), "name must not exceed 63"),
        (join([], [tensor_bytes("a", [], 0, 0) + bytes(8)], bytes(32)), "1 to 4 dimensions; got 0"),
        (join([], [tensor_bytes("a", [1] * 5, 0, 0)], bytes(32)), "1 to 4 dimensions; got 5"),
        (join([], [tensor_bytes("a", [0], 0, 0)], b""), "a dimension is from 1"),
        (join([], [tensor_bytes("a", [2**63, 2], 0, 0)], bytes(32)), "a dimension is from 1"),
        (join([], [tensor_bytes("a", [2**40] * 4, 0, 0)], bytes(32)), "cut short"),
        (join([], [tensor_bytes("a", [8], 99, 0)], bytes(32)), "unknown type 99"),
        (join([], [tensor_bytes("a", [8], 8, 0)], bytes(32)), "Q8_0 has blocks of 32"),
        (join([], [tensor_bytes("a", [8], 0, 8)], bytes(40)), "a multiple of 32; got 8"),
        (join([], [A, tensor_bytes("b", [8], 0, 0)], bytes(32)), "'a' and 'b' overlap"),
        (join([], [A, tensor_bytes("b", [8], 0, 64)], bytes(96)), "32 unreferenced bytes before"),
        (join([], [tensor_bytes("a", [8], 0, 32)], bytes(64)), "32 unreferenced bytes before"),
        (join([], [A], bytes(31)), "cut short: tensor 'a' ends at byte 32 of 31"),
        (join([], [tensor_bytes("a", [8], 0, 2**63)], bytes(32)), "unreferenced bytes before"),
        (join([], [A], bytes(64)), "32 unreferenced bytes at the end"),
        (join([], [A], bytes(33)), "1 unreferenced bytes at the end"),
    ],
)
def test_the_violated_rule_is_named(data, message, tmp_path):
    with pytest.raises(ScratchLMError, match=message) as error:
        read_gguf_file(put(tmp_path, data))
    one_line(error.value)


def test_what_the_rules_allow_is_read(tmp_path):
    keys = [NAME, key_bytes("general.alignment", U32, 64), key_bytes("k", ARRAY, (F32, [1.5, 2]))]
    tensors = [tensor_bytes("b", [3, 2], 0, 64), A]
    file = read_gguf_file(put(tmp_path, join(keys, tensors, bytes(64 + 24), alignment=64)))
    assert {name: (t.shape, t.start % 64) for name, t in file.tensors.items()} == {
        "b": ((2, 3), 0),
        "a": ((8,), 0),
    }
    assert file.metadata["k"].tolist() == [1.5, 2]
    assert is_gguf(tmp_path / "file.gguf")
    assert not is_gguf(tmp_path)


def test_a_sparse_file_of_terabytes_is_refused_by_its_header(tmp_path):
    path = put(tmp_path, join([], [tensor_bytes("a", [2**38], 0, 0)], b""))
    os.truncate(path, (1 << 40) + path.stat().st_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_gguf_file(path).tensors["a"].nbytes == 1 << 40
    with pytest.raises(ScratchLMError, match=r"general\.architecture must be one of"):
        read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


# Damage


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    torch.manual_seed(0)
    write_gguf(path, TINY, TransformerLM(TINY).state_dict())
    return path.read_bytes()


def test_every_flipped_byte_of_a_file_is_noticed_or_does_no_harm(tiny, tmp_path):
    """In the header: refused, or another value that shows. In the weights: that weight alone."""
    path = put(tmp_path, tiny)
    good = read_gguf(path)
    weights, header = dict(good), split(tiny)[0]
    refused = 0
    for at in range(len(tiny)):
        for flip in (0xFF, 1 << at % 8)[: 2 if at < header else 1]:
            rewrite(path, tiny[:at] + bytes([tiny[at] ^ flip]) + tiny[at + 1 :])
            try:
                found = read_gguf(path)
                tensors = dict(found)
            except ScratchLMError as error:
                one_line(error)
                refused += 1
                continue
            assert found.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            changed = sum(int((tensors[n] != weights[n]).sum()) for n in tensors.keys() & weights)
            if at < header:  # names and places are checked; a number is what it says
                assert changed == 0 or found.config != good.config, at
            else:
                assert found.config == good.config
                assert changed <= 1, at
    assert refused > header  # of twice as many


def test_a_flipped_byte_of_quantised_weights_changes_a_block_or_is_refused(tmp_path):
    config = TINY.replace(d_model=32, num_heads=1, d_ff=32, d_head=32)
    path = tmp_path / "good.gguf"
    write_gguf(path, config, TransformerLM(config).state_dict(), quantize="q8_0")
    good, weights, data = read_gguf(path), dict(read_gguf(path)), path.read_bytes()
    found = {1: 0, 32: 0, "refused": 0}
    for at in range(split(data)[0], len(data), 33):  # 34 bytes a block: every place of one
        path = put(tmp_path, data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            tensors = dict(read_gguf(path))
        except ScratchLMError as error:
            one_line(error)
            found["refused"] += 1
            continue
        assert tensors.keys() == weights.keys() == good.shapes.keys()
        changed = sum(int((tensors[name] != weights[name]).sum()) for name in tensors)
        found[1 if changed <= 1 else 32] += 1
        assert changed <= 32, at
    assert found[1] > 10 * found[32] > 0


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    tokenizer, path = prose_tokenizer(), tmp_path_factory.mktemp("tokens") / "model.gguf"
    config = ModelConfig(vocab_size=430, context_length=8, d_model=32, num_layers=1, num_heads=2)
    write_gguf(
        path,
        config,
        TransformerLM(config).state_dict(),
        tokenizer,
        quantize="q8_0",
        eos_token_ids=[tokenizer.special_tokens["<s>"]],
        chat_template=ChatTemplate({"default": "{{ messages }}", "tool_use": "{{ tools }}"}),
    )
    return path.read_bytes()


def damaged(good, path, count):
    """Read damaged files: a line or a model, never anything else; return how many were refused."""
    refused = tried = 0
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, data in mutations(good, count):
        rewrite(path, data)
        tried += 1
        try:
            found = read_gguf(path)
            tensors = dict(found)
        except ScratchLMError as error:
            one_line(error)
            refused += 1
        else:
            assert found.shapes == {n: tuple(t.shape) for n, t in tensors.items()}, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
    return refused, tried


DAMAGED = "damaged GGUF files, refused or read as they are"


@pytest.mark.parametrize(("which", "count"), [("tiny", 1000), ("with_tokenizer", 100)])
def test_damaged_files_are_refused_or_read_as_they_are(which, count, request, tmp_path, tried):
    good = request.getfixturevalue(which)
    refused, files = damaged(good, tmp_path / "file.gguf", count)
    assert files > count
    assert refused > 0.7 * files
    tried(DAMAGED, files)


@pytest.mark.slow
def test_many_damaged_files_are_refused_or_read_as_they_are(tiny, with_tokenizer, tmp_path, tried):
    for good, count in ((tiny, 30_000), (with_tokenizer, 5_000)):
        _, files = damaged(good, tmp_path / "file.gguf", count)
        tried(DAMAGED, files)


def test_items_of_other_types_are_no_tokenizer(with_tokenizer, tmp_path):
    word = b"tokenizer.ggml.token_type"
    at = with_tokenizer.index(word) + len(word) + 4
    data = with_tokenizer[:at] + struct.pack("<I", F32) + with_tokenizer[at + 4 :]
    assert struct.unpack("<I", with_tokenizer[at : at + 4]) == (I32,)
    found = read_gguf(put(tmp_path, data))
    assert found.tokens.tokenizer is None
    assert "token_type must hold a number" in found.tokens.problem
