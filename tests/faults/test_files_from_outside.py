"""Every file from outside is a regular file of bounded size, or is refused at once by its name."""

import codecs
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from faults.mutations import TUNING_READERS, write_tuning_files
from scratchlm import ModelConfig, TransformerLM
from scratchlm import checkpoint as ckpt
from scratchlm.check.loading import read_source
from scratchlm.cli.account_models import find_model
from scratchlm.cli.terminal import read_prompt
from scratchlm.config import load_config, preset, to_json, to_toml
from scratchlm.data import TokenFile, iter_documents
from scratchlm.errors import ScratchLMError
from scratchlm.inference import load_model
from scratchlm.interop import read_gguf, read_hf, write_gguf, write_hf
from scratchlm.tokenizer import load_tokenizer, train_bpe
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.training import read_text as pieces_of_text
from scratchlm.training import read_metrics, read_plan
from scratchlm.untrusted import read_bytes, read_json, read_text, read_toml
from training.tiny import write_data

CONFIG = ModelConfig(vocab_size=260, context_length=8, d_model=8, num_layers=1, num_heads=2)
REFUSED = (ScratchLMError, ValueError)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Make a directory with one of everything that can come from outside."""
    here = tmp_path_factory.mktemp("good")
    text = here / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    Tokenizer(*train_bpe(text, 260, ["<|endoftext|>"]), ["<|endoftext|>"]).save(here)
    weights = TransformerLM(CONFIG).state_dict()
    file = here / "tokenizer.json"
    ckpt.write_checkpoint(
        ckpt.checkpoint_path(here / "run", 1), model=weights, config=CONFIG, tokenizer_file=file
    )
    (here / "run" / "config.toml").write_text("")
    write_hf(here / "hf", CONFIG, weights, file)
    write_gguf(here / "m.gguf", CONFIG, weights)
    write_tuning_files(here)
    write_data(here / "data")
    (here / "gpt2").mkdir()
    (here / "gpt2" / "vocab.json").write_text(json.dumps({chr(33): 0}))
    (here / "gpt2" / "merges.txt").write_text("#version: 0.2\n")
    (here / "c.toml").write_text(to_toml(preset("gpt2")))
    (here / "c.json").write_text(to_json(preset("gpt2")))
    shutil.copy(here / "c.toml", here / "d.toml")
    (here / "mine.py").write_text("x = 1\n")
    (here / "run" / "metrics.jsonl").write_text('{"step": 0, "samples": []}\n')
    return here


STEP = "run/checkpoints/step-00000001"
READERS = {  # file -> who reads it
    "hf/config.json": lambda d: read_hf(d / "hf"),
    "hf/model.safetensors": lambda d: read_hf(d / "hf"),
    "hf/tokenizer.json": lambda d: read_hf(d / "hf"),
    "hf/generation_config.json": lambda d: read_hf(d / "hf"),
    "m.gguf": lambda d: read_gguf(d / "m.gguf"),
    "data/train.json": lambda d: TokenFile(d / "data" / "train"),
    "data/train.bin": lambda d: TokenFile(d / "data" / "train"),
    "data/val.bin": lambda d: TokenFile(d / "data" / "val"),
    "tokenizer.json": lambda d: load_tokenizer(d / "tokenizer.json"),
    "gpt2/vocab.json": lambda d: load_tokenizer(d / "gpt2"),
    "gpt2/merges.txt": lambda d: load_tokenizer(d / "gpt2"),
    "c.toml": lambda d: load_config(d / "c.toml"),
    "c.json": lambda d: find_model(str(d / "c.json")),
    "d.toml": lambda d: find_model(str(d / "d.toml")),
    "mine.py": lambda d: read_source(d / "mine.py"),
    "run/config.toml": lambda d: read_plan(d / "run"),
    "run/metrics.jsonl": lambda d: read_metrics(d / "run"),
    f"{STEP}/manifest.json": lambda d: ckpt.verify_checkpoint(d / STEP),
    f"{STEP}/config.json": lambda d: ckpt.verify_checkpoint(d / STEP),
    f"{STEP}/model.safetensors": lambda d: ckpt.verify_checkpoint(d / STEP),
    f"{STEP}/tokenizer.json": lambda d: load_model(d / STEP),
    **TUNING_READERS,
}
HUNG = """
import os, resource, signal, sys
signal.alarm(240)
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
sys.path.insert(0, {tests!r})
from pathlib import Path
from faults.test_files_from_outside import READERS, REFUSED, hostile
here = Path({here!r})
for file, read in READERS.items():
    for kind in ("fifo", "zero", "directory"):
        with hostile(here / file, kind):
            try:
                read(here)
                print("TAKEN", file, kind)
            except REFUSED as error:
                line = str(error)
                assert "\\n" not in line and Path(file).name in line, (file, kind, line)
            except OSError as error:
                assert kind == "directory", (file, kind, error)
print("done")
"""


class hostile:
    """Put a FIFO, a link to /dev/zero or a directory in a file's place for a while."""

    def __init__(self, path, kind):
        self.path, self.kind, self.kept = path, kind, path.with_name(f"{path.name}.kept")

    def __enter__(self):
        self.path.rename(self.kept)
        if self.kind == "fifo":
            os.mkfifo(self.path)
        elif self.kind == "zero":
            self.path.symlink_to("/dev/zero")
        else:
            self.path.mkdir()

    def __exit__(self, *error):
        self.path.rmdir() if self.kind == "directory" else self.path.unlink()
        self.kept.rename(self.path)


def test_no_fifo_device_or_directory_is_waited_for_or_read(good, tmp_path):
    """In a process of its own, which an alarm ends: before, most of these never came back."""
    here = tmp_path / "here"
    shutil.copytree(good, here)
    script = HUNG.format(tests=str(Path(__file__).parent.parent), here=str(here))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", (done.returncode, done.stdout, done.stderr[-2000:])


BY_PROGRAMS = (".gguf", ".bin", ".safetensors", ".parquet", ".examples")


@pytest.mark.parametrize(
    "file", [f for f in READERS if not f.endswith(BY_PROGRAMS) and not f.startswith(STEP)]
)
def test_a_byte_order_mark_before_a_file_changes_nothing(good, tmp_path, file):
    here = tmp_path / "here"
    shutil.copytree(good, here)
    before = refusal(file, here)
    (here / file).write_bytes(codecs.BOM_UTF8 + (here / file).read_bytes())
    assert refusal(file, here) == before


def refusal(file, here):
    """Return why a file is not taken, or None."""
    try:
        READERS[file](here)
    except REFUSED as error:
        return str(error)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, monkeypatch):
    text = "é\ufeff\r\n"
    for kind, line in (("txt", text), ("jsonl", json.dumps({"text": text}))):
        file = tmp_path / f"one.{kind}"
        file.write_bytes(codecs.BOM_UTF8 + line.encode())
        assert list(iter_documents([file])) == [text]
    file = tmp_path / "one.txt"
    assert "".join(pieces_of_text(file)) == read_text(file, 99) == text
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\ufeff{text}"))
    assert read_prompt("-") == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    with pytest.raises(ScratchLMError, match="standard input: not UTF-8 at byte 2"):
        read_prompt("-")


def test_a_file_of_more_than_its_bound_is_refused_and_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"x" * 11)
    assert read_bytes(path, 11) == b"x" * 11
    with pytest.raises(ScratchLMError, match=r"config\.json: must not exceed 10 bytes; got 11"):
        read_bytes(path, 10)
    os.truncate(path, 1 << 43)  # sparse: reading it would take all memory
    with pytest.raises(ScratchLMError, match="must not exceed"):
        read_bytes(path, 1 << 20)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.json", '{"a":' * 50_000),
        ("deep.toml", "a = " + "[" * 50_000),
        ("twice.json", '{"a": 1, "a": 2}'),
        ("nan.json", '{"a": NaN}'),
        ("bytes.toml", b"\xff"),
    ],
)
def test_what_is_no_json_or_toml_is_one_line_with_the_files_name(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ScratchLMError, match=name) as caught:
        read_toml(path) if name.endswith("toml") else read_json(path, 1 << 20)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=name):
        load_config(path)


def rewrite_manifest(path, change):
    """Write a manifest that is not what we write, with a hash that is right."""
    manifest = ckpt.read_manifest(path)
    change(manifest)
    manifest["sha256"] = ckpt.manifest_digest(manifest)
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))


MANIFESTS = {
    "no size": lambda m: m["files"]["config.json"].pop("size"),
    "size of text": lambda m: m["files"]["config.json"].update(size="many"),
    "no sha256": lambda m: m["files"]["config.json"].pop("sha256"),
    "files a list": lambda m: m.update(files=list(m["files"])),
    "files empty": lambda m: m.update(files={}),
    "no files": lambda m: m.pop("files"),
    "no metadata": lambda m: m.pop("metadata"),
    "metadata a list": lambda m: m.update(metadata=[]),
    "terabytes": lambda m: m["files"]["config.json"].update(size=10**15),
    "a path": lambda m: m["files"].update({"../x": {"size": 1, "sha256": ""}}),
    "a missing file": lambda m: m["files"].update(more={"size": 1, "sha256": ""}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_we_did_not_write_is_one_line(good, tmp_path, name):
    path = tmp_path / "step-00000001"
    shutil.copytree(good / STEP, path)
    rewrite_manifest(path, MANIFESTS[name])
    with pytest.raises(ScratchLMError, match="step-00000001") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def rewrite(path, file, data):
    (path / file).write_bytes(data)

    def change(manifest):
        import hashlib

        manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    rewrite_manifest(path, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 16384}, "describes 16384 layers; the files hold 12 tensors"),
        ({"d_model": 2**20, "num_heads": 2**14, "d_ff": 2**22}, "misshapen: token_embeddings"),
        ({"vocab_size": 2**24}, "misshapen: token_embeddings"),
    ],
)
def test_shapes_are_compared_before_anything_is_built(good, tmp_path, change, message, monkeypatch):
    path = tmp_path / "step-00000001"
    shutil.copytree(good / STEP, path)
    rewrite(path, ckpt.CONFIG, to_json(CONFIG.replace(**change)).encode())
    monkeypatch.setattr(
        "scratchlm.inference.loading._empty_model", lambda *a, **k: pytest.fail("built")
    )
    with pytest.raises(ScratchLMError, match=message):
        load_model(path)


def test_integer_weights_are_refused_by_name(good, tmp_path):
    path = tmp_path / "step-00000001"
    shutil.copytree(good / STEP, path)
    integers = {name: t.to(torch.int64) for name, t in ckpt.read_tensors(path).items()}
    (path / ckpt.MODEL).unlink()
    ckpt.write_tensors(path / ckpt.MODEL, integers)
    rewrite(path, ckpt.MODEL, (path / ckpt.MODEL).read_bytes())
    with pytest.raises(ScratchLMError, match=r"weights must be .*token_embeddings.weight is I64"):
        load_model(path)
