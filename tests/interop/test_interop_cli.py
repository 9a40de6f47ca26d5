"""`scratchlm import` and `scratchlm export`, as a user runs them."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from interop.hf_models import (
    assert_same_bytes,
    hf_model,
    load_with_transformers,
    logits_of,
    token_ids,
    weights,
)
from scratchlm import TransformerLM, cli
from scratchlm import config as c
from scratchlm.checkpoint import (
    checkpoint_path,
    read_config,
    read_manifest,
    read_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from scratchlm.interop import read_hf
from scratchlm.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, train_bpe
from tiny_models import FAMILIES, PLAIN, build

TEXT = "the cat sat on the mat; the dog saw the cat and the cat saw the dog. " * 20


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command; give back status, stdout and stderr."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["scratchlm", *map(str, words)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return command


@pytest.fixture
def tokenizer_file(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    vocab, merges = train_bpe(tmp_path / "text", 300, ["<|endoftext|>"])
    Tokenizer(vocab, merges, ["<|endoftext|>"]).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer" / "tokenizer.json"


@pytest.fixture
def checkpoint(tmp_path, tokenizer_file):
    """A checkpoint of ours with a tokenizer, in a run."""
    config = FAMILIES["qwen3"].replace(vocab_size=300, positions=c.Rotary(1e6, "interleaved"))
    return write_checkpoint(
        checkpoint_path(tmp_path / "run", 5),
        model=build(config, dtype=torch.float32).state_dict(),
        config=config,
        tokenizer_file=tokenizer_file,
    )


@pytest.mark.parametrize("family", ["llama 3.2", "qwen3 moe", "gpt2"])
def test_import_then_export_is_byte_identical(family, run, tmp_path):
    theirs = hf_model(family, torch.bfloat16)
    theirs.generation_config.eos_token_id = [3, 5]
    theirs.save_pretrained(tmp_path / "in")
    status, out, err = run("import", tmp_path / "in", tmp_path / "ours")
    assert (status, err) == (0, "")
    assert f"{theirs.config.model_type}, " in out
    verify_checkpoint(tmp_path / "ours")
    assert read_config(tmp_path / "ours") == read_hf(tmp_path / "in").config
    assert_same_bytes(read_tensors(tmp_path / "ours"), dict(read_hf(tmp_path / "in")))
    assert run("export", tmp_path / "ours", tmp_path / "out")[0] == 0
    assert_same_bytes(weights(tmp_path / "out"), weights(tmp_path / "in"))
    assert read_hf(tmp_path / "out").eos_token_ids == (3, 5)
    assert load_with_transformers(tmp_path / "out").generation_config.eos_token_id == [3, 5]


def test_a_run_is_exported_with_its_tokenizer_and_imported_again(run, tmp_path, checkpoint):
    status, out, err = run("export", tmp_path / "run", tmp_path / "out")
    assert (status, err) == (0, "checkpoint: step 5, the last\n")
    assert "qwen3, " in out
    theirs, ours = load_with_transformers(tmp_path / "out"), TransformerLM(read_config(checkpoint))
    ours.load_state_dict(read_tensors(checkpoint))
    ids = token_ids(seq=20, vocab=300)
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(ours, ids), rtol=1e-5, atol=1e-5)

    tokenizer = load_tokenizer(checkpoint)
    fast = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the dog sat on the cat's mat"
    assert fast.encode(text) == list(tokenizer.encode(text))
    assert fast.eos_token == "<|endoftext|>"
    end = tokenizer.special_tokens["<|endoftext|>"]
    assert fast.eos_token_id == theirs.config.eos_token_id == end
    assert theirs.generation_config.eos_token_id == end

    assert run("import", tmp_path / "out", tmp_path / "back")[0] == 0
    original = (checkpoint / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == original
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == original
    assert read_manifest(tmp_path / "back")["metadata"]["eos_token_ids"] == [end]


def test_export_converts_dtype_and_shards(run, tmp_path, checkpoint):
    options = ("--dtype", "bfloat16", "--max-shard-gb", "0.00001")
    assert run("export", checkpoint, tmp_path / "out", *options)[0] == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert run("import", tmp_path / "out", tmp_path / "wide", "--dtype", "float64")[0] == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {t.dtype for t in wide.values()} == {torch.float64}


def test_a_scratchlm_only_tokenizer_is_exported_and_reported(run, tmp_path):
    CharTokenizer.of_text([TEXT]).save(tmp_path / "tokenizer")
    write_checkpoint(
        tmp_path / "ours",
        model=build(PLAIN, dtype=torch.float32).state_dict(),
        config=PLAIN,
        tokenizer_file=tmp_path / "tokenizer" / "tokenizer.json",
    )
    status, out, _ = run("export", tmp_path / "ours", tmp_path / "out")
    assert status == 0
    assert "only scratchlm reads" in out
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_nonfinite_weights_are_imported_only_with_the_flag(run, tmp_path):
    model = hf_model("llama 3")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "in")
    status, _, err = run("import", tmp_path / "in", tmp_path / "ours")
    assert (status, err.count("\n")) == (2, 1)
    assert "'lm_head.weight' holds NaN" in err
    assert not (tmp_path / "ours").exists()
    assert run("import", tmp_path / "in", tmp_path / "ours", "--allow-nonfinite")[0] == 0


def test_user_errors_are_one_line_and_exit_status_2(run, tmp_path, checkpoint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    write_checkpoint(
        tmp_path / "post",
        model=build(FAMILIES["post-norm"]).state_dict(),
        config=FAMILIES["post-norm"],
    )
    hf_model("llama 3").save_pretrained(tmp_path / "in")
    for words, reason in (
        (("import", "nowhere", tmp_path / "o"), "nowhere: no such directory"),
        (("import", tmp_path / "empty", tmp_path / "o"), "no file 'config.json'"),
        (("import", checkpoint, tmp_path / "o"), "model_type must be one of"),
        (("import", tmp_path / "in", tmp_path / "full"), "full exists already"),
        (("export", "nowhere", tmp_path / "o"), "neither a checkpoint nor a run"),
        (("export", tmp_path / "in", tmp_path / "o"), "neither a checkpoint nor a run"),
        (("export", tmp_path / "post", tmp_path / "o"), "norm_placement is 'post'"),
        (("export", checkpoint, tmp_path / "full"), "full exists already"),
        (("export", checkpoint, tmp_path / "o", "--max-shard-gb", "0"), "--max-shard-gb must be"),
    ):
        status, out, err = run(*words)
        assert (status, out) == (2, ""), words
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert reason in err
    assert not (tmp_path / "o").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, checkpoint):
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(bytes(data))
    status, _, err = run("export", checkpoint, tmp_path / "out")
    assert status == 2
    assert "is damaged" in err


def test_reading_a_config_needs_no_torch():
    code = "import sys, scratchlm.interop.hf_config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_help_names_the_families(run):
    status, out, _ = run("import", "--help")
    assert status == 0
    for model_type in (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "olmo",
        "gpt2",
    ):
        assert f"- {model_type}: " in out
