"""Somebody else's files: damaged, absurd or hostile, they end in one line, or load as they are."""

import gc
import json
import os
import resource
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop.damage import all_mutations
from interop.hf_models import hf_model
from rewriting import rewrite
from scratchlm import TransformerLM
from scratchlm.errors import ScratchLMError
from scratchlm.interop import is_hf_directory, read_hf
from scratchlm.interop.streaming import is_finite

REFUSALS = (ScratchLMError, ValueError)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Good directories by name: {file: bytes}."""
    made = {}
    for name, family, shard in (
        ("llama", "llama 3", "5GB"),
        ("gpt2", "gpt2", "5GB"),
        ("qwen3_moe", "qwen3 moe", "5GB"),
        ("sharded", "qwen3", "9KB"),
    ):
        directory = tmp_path_factory.mktemp(name)
        hf_model(family).save_pretrained(directory, max_shard_size=shard)
        made[name] = {file.name: file.read_bytes() for file in directory.iterdir()}
    return made


def put(directory, files):
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        rewrite(directory / name, content)


@pytest.fixture
def llama(good, tmp_path):
    put(tmp_path / "llama", good["llama"])
    return tmp_path / "llama"


def one_line(error):
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 1500, len(text)
    text.encode("utf-8")  # fit for a terminal: no lone surrogates


class Work:
    """What was allocated and read: bounded work is bounded time on any machine."""

    def __init__(self, monkeypatch):
        self.allocated = 0
        real = torch.empty

        def counting(*shape, **options):
            tensor = real(*shape, **options)
            self.allocated += tensor.nbytes
            return tensor

        monkeypatch.setattr(torch, "empty", counting)


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_thousands_of_damaged_directories_are_refused_or_read_as_they_are(
    good, tmp_path, monkeypatch
):
    work = Work(monkeypatch)
    for name, files in good.items():
        put(tmp_path / name, files)
    largest = max(sum(map(len, files.values())) for files in good.values())
    count = refused = 0
    before = None
    for where, what, files in all_mutations(good):
        directory = tmp_path / where
        for file, content in files.items():
            if content is None:
                (directory / file).unlink()
                continue
            if isinstance(content, tuple):
                content = good[where][content[1]]
            rewrite(directory / file, content)
        work.allocated = 0
        try:
            checkpoint = read_hf(directory)
            tensors = dict(checkpoint)
        except REFUSALS as error:
            one_line(error)
            refused += 1
        else:
            assert {n: tuple(t.shape) for n, t in tensors.items()} == checkpoint.shapes, what
            if "model.safetensors" in files:  # the reference library reads the same file
                stored = load_file(directory / "model.safetensors")
                head = "token_embeddings.weight"
                theirs = checkpoint.mapping.links[head][0].theirs
                assert torch.equal(tensors[head], stored[theirs]), what
        assert work.allocated < 3 * largest + 2**20, (what, work.allocated)
        put(directory, {file: good[where][file] for file in files})
        count += 1
        if count == 500:
            gc.collect()
            before = peak_memory()
    assert count >= 2_000
    assert refused > 0.7 * count
    assert peak_memory() - before < 64 * 2**20
    for name in good:  # and the good ones are still read
        assert dict(read_hf(tmp_path / name))


# Weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value, dtype, llama):
    good = {
        name: tensor.to(dtype) for name, tensor in load_file(llama / "model.safetensors").items()
    }
    name = "model.layers.1.mlp.up_proj.weight"
    size = good[name].numel()
    for at in (0, 1, 15, 16, 17, 100, size // 2, size - 2, size - 1):
        bad = {**good, name: good[name].clone()}
        bad[name].view(-1)[at] = value
        save_file(bad, llama / "model.safetensors")
        checkpoint = read_hf(llama)
        with pytest.raises(ScratchLMError, match=rf"'{name}' holds NaN or infinite values"):
            dict(checkpoint)
        assert len(dict(checkpoint.tensors(allow_nonfinite=True))) == len(good)


@pytest.mark.parametrize("part", [0, 1, 2])  # query, key, value
def test_what_is_not_finite_is_found_in_every_part_of_a_transposed_matrix(part, tmp_path):
    hf_model("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    tensors[name].unflatten(1, (3, -1))[-1, part, -1] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = read_hf(tmp_path)
    state = TransformerLM(checkpoint.config).state_dict()
    with pytest.raises(ScratchLMError, match=rf"'{name}' holds NaN or infinite values"):
        checkpoint.load_into(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_values_are_taken_though_their_sum_is_not(dtype):
    largest = torch.full((40,), torch.finfo(dtype).max, dtype=dtype)
    assert largest.sum().isinf()
    assert is_finite(largest)
    assert not is_finite(torch.cat([largest, -largest * 2]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"missing 'lm_head\.weight'$"),
        (lambda t: t.update(x=torch.ones(1)), r"unexpected 'x'$"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(60, 32)}),
            r"lm_head\.weight must be \[61, 32\], got \[60, 32\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(61, 32, dtype=torch.int8)}),
            r"not quantized\): lm_head\.weight is I8",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.1" in name],
            r"missing 'model\.layers\.1\..* and 3 more",
        ),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_named(edit, message, llama):
    tensors = load_file(llama / "model.safetensors")
    edit(tensors)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(ScratchLMError, match=message):
        read_hf(llama)


def test_a_file_that_shrinks_after_it_was_checked_is_an_error_not_a_crash(llama):
    checkpoint = read_hf(llama)
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:-5000])
    with pytest.raises(ScratchLMError, match="ended while it was being read"):
        dict(checkpoint)


# Files


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_never_opened_and_the_conversion_is_suggested(name, llama):
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(b"cos\nsystem\n(S'touch PWNED'\ntR.")
    with pytest.raises(ScratchLMError, match=rf"{name}.*convert it.*save_pretrained"):
        read_hf(llama)


def test_a_directory_without_weights_or_config_says_so(llama, tmp_path):
    (llama / "model.safetensors").unlink()
    with pytest.raises(ScratchLMError, match=r"neither model\.safetensors nor"):
        read_hf(llama)
    (llama / "config.json").unlink()
    assert not is_hf_directory(llama)
    with pytest.raises(ScratchLMError, match=r"no file 'config\.json'"):
        read_hf(llama)
    with pytest.raises(ScratchLMError, match="no such directory"):
        read_hf(tmp_path / "nowhere")


def test_links_of_the_hub_cache_are_followed_and_links_elsewhere_are_not(good, tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, (name, content) in enumerate(good["llama"].items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert dict(read_hf(snapshot))
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ScratchLMError, match=r"'tokenizer\.json' is a link that leaves"):
        read_hf(snapshot)


def test_loops_of_links_directories_and_pipes_in_place_of_files_are_refused(llama):
    weights = llama / "model.safetensors"
    weights.unlink()
    weights.symlink_to("model.safetensors")
    with pytest.raises(ScratchLMError, match=r"cannot be opened|no file"):
        read_hf(llama)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ScratchLMError, match="not a regular file"):
        read_hf(llama)
    weights.rmdir()
    os.mkfifo(weights)  # reading a pipe nobody writes to would wait for ever
    outcome = []

    def attempt():
        try:
            read_hf(llama)
        except ScratchLMError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=600)
    assert outcome, "waits for a pipe"
    assert "not a regular file" in outcome[0]


def test_two_sets_of_weights_are_refused(llama):
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ScratchLMError, match="both there"):
        read_hf(llama)


def test_a_huge_file_of_zeros_costs_nothing(llama):
    with open(llama / "model.safetensors", "wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no disk
    with pytest.raises(ScratchLMError, match="must begin with"):
        read_hf(llama)
    with open(llama / "model.safetensors", "r+b") as file:
        file.write((2**39).to_bytes(8, "little"))
    with pytest.raises(ScratchLMError, match="the header claims 549,755,813,888 bytes"):
        read_hf(llama)


def test_a_config_larger_than_any_config_is_not_read(llama):
    with open(llama / "config.json", "ab") as file:
        file.truncate(2**30)
    with pytest.raises(ScratchLMError, match="must not exceed"):
        read_hf(llama)
    assert not is_hf_directory(llama)
