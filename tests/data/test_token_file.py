"""A token file is whole or it is an error; never a crash, never half of one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.data.token_file import TokenFile, dtype_for, token_paths, write_token_file
from scratchlm.errors import ScratchLMError


def write(path, ids=range(1000), vocab_size=5000, **more):
    return write_token_file(path, ids, vocab_size=vocab_size, tokenizer="fingerprint", **more)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (1 << 32, "<u4")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_chosen(vocab_size, dtype):
    assert dtype_for(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize(("vocab_size", "size"), [(65_536, 2), (65_537, 4)])
def test_the_bytes_on_disk_are_little_endian(tmp_path, vocab_size, size):
    ids = [0, 1, 258, 65_535]
    write(tmp_path / "t", ids, vocab_size)
    data = (tmp_path / "t.bin").read_bytes()
    assert data == b"".join(i.to_bytes(size, "little") for i in ids)
    assert np.fromfile(tmp_path / "t.bin", f"<u{size}").tolist() == ids  # as nanoGPT would


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back(tmp_path_factory, data):
    ids = data.draw(st.lists(st.integers(0, 99_999), min_size=1, max_size=300))
    path = tmp_path_factory.mktemp("t") / "tokens"
    write(path, ids, 100_000)
    with TokenFile(path) as tokens:
        assert len(tokens) == len(ids)
        assert tokens.read(0, len(ids)).tolist() == ids
        start = data.draw(st.integers(0, len(ids)))
        count = data.draw(st.integers(0, len(ids) - start))
        assert tokens.read(start, count).tolist() == ids[start : start + count]
        assert np.concatenate(list(tokens.chunks(7))).tolist() == ids
        tokens.validate()


def test_a_file_may_be_named_with_or_without_its_suffix(tmp_path):
    write(tmp_path / "val.x.bin")
    for name in ("val.x", "val.x.bin", "val.x.json"):
        with TokenFile(tmp_path / name) as tokens:
            assert len(tokens) == 1000


def test_nothing_is_left_beside_the_two_files(tmp_path):
    write(tmp_path / "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.bin", "t.json"]


def refusal(path, **expectations):
    with pytest.raises(ScratchLMError) as caught:
        TokenFile(path, **expectations)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "no.bin") == f"{tmp_path}/no.bin: no such token file"


def test_data_without_a_sidecar_is_unfinished(tmp_path):
    write(tmp_path / "t")
    (tmp_path / "t.json").unlink()
    assert "was not finished" in refusal(tmp_path / "t")


def test_a_sidecar_without_data_is_refused(tmp_path):
    write(tmp_path / "t")
    (tmp_path / "t.bin").unlink()
    assert "the data is not" in refusal(tmp_path / "t")


@pytest.mark.parametrize("size", [0, 1, 1999, 2001, 4000])
def test_a_file_of_another_size_is_refused_on_opening(tmp_path, size):
    write(tmp_path / "t")
    os.truncate(tmp_path / "t.bin", size)
    assert f"expected 2,000 bytes (1,000 × 2), got {size:,}" in refusal(tmp_path / "t")


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    write(tmp_path / "t")
    assert "another tokenizer" in refusal(tmp_path / "t", expect_fingerprint="other")
    assert "vocab_size=5000; the model's vocab_size is 4999" in refusal(
        tmp_path / "t", vocab_size=4999
    )
    TokenFile(tmp_path / "t", expect_fingerprint="fingerprint", vocab_size=5056).close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype must be one of uint16, uint32; got 'float32'"),
        ({"count": -1}, "count must be an integer >= 0; got -1"),
        ({"count": "1000"}, "count must be an integer >= 0; got '1000'"),
        ({"version": 2}, "version must be 1; got 2"),
        ({"vocab_size": 70_000}, "dtype uint16 cannot hold vocab_size=70000"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"tokenizer": 3}, "tokenizer must be a string"),
        ({"sources": [1]}, "sources must be a list"),
    ],
)
def test_a_wrong_sidecar_is_one_line(tmp_path, change, message):
    write(tmp_path / "t")
    sidecar = tmp_path / "t.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **change}))
    assert message in refusal(tmp_path / "t")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"count": 1}', "\x00", "[" * 100_000])
def test_a_broken_sidecar_is_one_line(tmp_path, text):
    write(tmp_path / "t")
    (tmp_path / "t.json").write_text(text)
    assert "not a token file's sidecar" in refusal(tmp_path / "t")


def test_truncation_after_opening_is_an_error(tmp_path):
    write(tmp_path / "t")
    with TokenFile(tmp_path / "t") as tokens:
        os.truncate(tmp_path / "t.bin", 101)
        assert tokens.read(0, 50).tolist() == list(range(50))
        with pytest.raises(ScratchLMError, match=r"ends at byte 101, expected 2,000.*while in use"):
            tokens.read(0, 51)
        with pytest.raises(ScratchLMError, match="while in use"):
            tokens.read(900, 10)


def test_a_memory_map_would_have_died(tmp_path):
    """Why we do not map: the same truncation under numpy's memmap is a killed process."""
    ids = np.zeros(100_000, dtype=np.uint16)
    write(tmp_path / "t", ids)
    code = (
        "import numpy, os, sys; m = numpy.memmap(sys.argv[1], 'uint16', 'r');"
        "os.truncate(sys.argv[1], 0); print(m[-1])"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "t.bin"], capture_output=True)
    assert result.returncode == -7  # SIGBUS


def test_reading_outside_or_after_closing_is_refused(tmp_path):
    write(tmp_path / "t")
    tokens = TokenFile(tmp_path / "t")
    for start, count in ((-1, 2), (999, 2), (1001, 0)):
        with pytest.raises(ValueError, match="not within"):
            tokens.read(start, count)
    tokens.close()
    tokens.close()
    with pytest.raises(ValueError, match="after close"):
        tokens.read(0, 1)


def test_validation_finds_an_id_outside_the_vocabulary(tmp_path):
    write(tmp_path / "t")
    with open(tmp_path / "t.bin", "r+b") as file:
        file.seek(500)
        file.write((5000).to_bytes(2, "little"))
    with TokenFile(tmp_path / "t") as tokens, pytest.raises(ScratchLMError, match="id 5000 is not"):
        tokens.validate()


def test_validation_finds_a_single_changed_bit(tmp_path):
    write(tmp_path / "t")
    with open(tmp_path / "t.bin", "r+b") as file:
        file.seek(500)
        file.write(b"\xfb")
    with TokenFile(tmp_path / "t") as tokens, pytest.raises(ScratchLMError, match="CRC-32"):
        tokens.validate()


def test_ids_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    for ids in ([5000], [-1]):
        with pytest.raises(ValueError, match="ids must be in 0 … 4999"):
            write(tmp_path / "t", ids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [".", "/", "..", "data/"])
def test_a_directory_is_no_token_file_and_no_error(path):
    assert all(not file.exists() for file in token_paths(path))
