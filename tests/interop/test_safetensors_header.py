"""Each rule of the format, broken alone: the one it is about must notice."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from scratchlm.errors import ScratchLMError
from scratchlm.interop.safetensors_file import read_header
from scratchlm.untrusted import brief, inner_file, listed, parse_json, shown

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]}


def write(path, header, body=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "file").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path / "file"


def test_a_file_of_the_library_is_read_where_it_says(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    stored = read_header(tmp_path / "file", 10_000)
    data = (tmp_path / "file").read_bytes()
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        place = stored[name]
        assert place.shape == tuple(tensor.shape)
        raw = data[place.start : place.start + place.nbytes]
        assert raw == bytes(tensor.view(torch.uint8).numpy().data)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": A, "b": {**B, "data_offsets": [4, 12]}}, 12, "'a' and 'b' overlap"),
        ({"a": A, "b": {**A}}, 8, "'a' and 'b' overlap"),
        ({"a": A, "b": {**B, "data_offsets": [12, 20]}}, 20, "4 unreferenced bytes before 'b'"),
        ({"a": {**A, "data_offsets": [8, 16]}}, 16, "8 unreferenced bytes before 'a'"),
        ({"a": A, "b": B}, 15, "cut short: tensor 'b' ends at byte 16 of 15"),
        ({"a": A, "b": B}, 17, "1 unreferenced bytes at the end"),
        ({"a": {**A, "shape": [3]}}, 8, r"F32 of shape \[3\] takes 12 bytes; its offsets span 8"),
        ({"a": {**A, "shape": [-2]}}, 8, "whole numbers"),
        ({"a": {**A, "shape": [2.0]}}, 8, "whole numbers"),
        ({"a": {**A, "shape": [True, 2]}}, 8, "whole numbers"),
        ({"a": {**A, "shape": [2] + [1] * 8}}, 8, "at most 8"),
        ({"a": {**A, "shape": [2**41, 0], "data_offsets": [0, 0]}}, 0, "whole numbers"),
        ({"a": {**A, "data_offsets": [8, 0]}}, 8, "begin ≤ end"),
        ({"a": {**A, "data_offsets": [-8, 0]}}, 8, "begin ≤ end"),
        ({"a": {**A, "data_offsets": [0, 8, 16]}}, 8, "begin ≤ end"),
        ({"a": {**A, "dtype": "F31"}}, 8, "unknown dtype 'F31'"),
        ({"a": {**A, "more": 1}}, 8, "exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "exactly dtype, shape and data_offsets"),
        ({"a": [A]}, 8, "exactly dtype, shape and data_offsets"),
        ({"a": A, "__metadata__": {"x": 1}}, 8, "__metadata__ must hold text"),
        ({"a": A, "__metadata__": []}, 8, "__metadata__ must hold text"),
        (b" {}", 0, "must begin with"),
        (b"{", 0, "not valid JSON"),
        (b'{"a":1,"a":1}', 0, "the key 'a' stands twice"),
        (b'{"a":NaN}', 0, "NaN is not a JSON value"),
        (b'{"a":' + b"[" * 50_000, 0, "nested too deeply"),
        (b'{"\xff":1}', 0, "not valid JSON"),
    ],
)
def test_the_violated_rule_is_named(header, size, message, tmp_path):
    path = write(tmp_path, header, bytes(size))
    with pytest.raises(ScratchLMError, match=message) as error:
        read_header(path, 100_000)
    assert "\n" not in str(error.value)


def test_a_header_longer_than_allowed_is_not_parsed(tmp_path):
    path = write(tmp_path, {"a": A, "b": B})
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert read_header(path, length)
    with pytest.raises(ScratchLMError, match=f"needs at most {length - 1}"):
        read_header(path, length - 1)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0", "C:a", 1, None]
)
def test_only_a_plain_name_opens_a_file(name, tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ScratchLMError, match=r"not a plain file name|a file name was"):
        inner_file(tmp_path, name)
    assert inner_file(tmp_path, "a") == tmp_path / "a"


def test_names_from_files_are_shown_on_one_line_and_briefly():
    assert shown("a\nb") == r"'a\nb'"
    assert shown("\ud800\x1b[31m") == r"'\ud800\x1b[31m'"
    assert len(shown("x" * 10_000)) <= 80
    assert listed("abcdefgh") == "'a', 'b', 'c', 'd', 'e', 'f' and 2 more"
    assert len(brief("é\n" * 10_000)) <= 300
    assert "\n" not in brief("a\nb")


def test_json_that_is_no_object_is_refused():
    with pytest.raises(ScratchLMError, match="a JSON object was expected; got list"):
        parse_json(b"[]", "x")
