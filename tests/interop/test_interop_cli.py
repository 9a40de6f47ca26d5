"""`scratchlm import` and `scratchlm export`, as a user runs them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from interop.hf_models import (
    assert_same_bytes,
    hf_model,
    load_with_transformers,
    logits_of,
    token_ids,
    weights,
)
from scratchlm import TransformerLM
from scratchlm import config as c
from scratchlm.checkpoint import (
    checkpoint_path,
    read_config,
    read_manifest,
    read_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from scratchlm.inference import load_model
from scratchlm.interop import read_hf
from scratchlm.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, train_bpe
from tiny_models import FAMILIES, PLAIN, build

TEXT = "the cat sat on the mat; the dog saw the cat and the cat saw the dog. " * 20


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
def test_import_then_export_is_byte_identical(family, cli, tmp_path):
    theirs = hf_model(family, torch.bfloat16)
    theirs.generation_config.eos_token_id = [3, 5]
    theirs.save_pretrained(tmp_path / "in")
    status, out, err = cli("import", tmp_path / "in", tmp_path / "ours")
    assert (status, err) == (0, "")
    assert f"{theirs.config.model_type}, " in out
    verify_checkpoint(tmp_path / "ours")
    assert read_config(tmp_path / "ours") == read_hf(tmp_path / "in").config
    assert_same_bytes(read_tensors(tmp_path / "ours"), dict(read_hf(tmp_path / "in")))
    assert cli("export", tmp_path / "ours", tmp_path / "out")[0] == 0
    assert_same_bytes(weights(tmp_path / "out"), weights(tmp_path / "in"))
    assert read_hf(tmp_path / "out").eos_token_ids == (3, 5)
    assert load_with_transformers(tmp_path / "out").generation_config.eos_token_id == [3, 5]


def test_a_tokenizer_that_cannot_be_read_is_kept_and_named(cli, tmp_path, checkpoint):
    assert cli("export", tmp_path / "run", tmp_path / "out")[0] == 0
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    status, out, err = cli("import", tmp_path / "out", tmp_path / "back")
    assert (status, err) == (0, "")
    assert "its tokenizer.json kept, but it cannot be used here: " in out
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_a_run_is_exported_with_its_tokenizer_and_imported_again(cli, tmp_path, checkpoint):
    status, out, err = cli("export", tmp_path / "run", tmp_path / "out")
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

    assert cli("import", tmp_path / "out", tmp_path / "back")[0] == 0
    original = (checkpoint / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == original
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == original
    assert read_manifest(tmp_path / "back")["metadata"]["eos_token_ids"] == [end]


def test_export_converts_dtype_and_shards(cli, tmp_path, checkpoint):
    options = ("--dtype", "bfloat16", "--max-shard-gb", "0.00001")
    assert cli("export", checkpoint, tmp_path / "out", *options)[0] == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert cli("import", tmp_path / "out", tmp_path / "wide", "--dtype", "float64")[0] == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {t.dtype for t in wide.values()} == {torch.float64}


def test_a_chat_template_comes_along_in_and_out(cli, tmp_path, checkpoint):
    said = [{"role": "user", "content": "hi"}]
    assert cli("export", checkpoint, tmp_path / "out")[0] == 0
    table = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    table |= {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<b>"}
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(table))
    assert cli("import", tmp_path / "out", tmp_path / "in")[0] == 0
    verify_checkpoint(tmp_path / "in")
    assert load_model(tmp_path / "in").chat_template.render(said) == "<b>hi"
    assert cli("export", tmp_path / "in", tmp_path / "again")[0] == 0
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
    assert theirs.apply_chat_template(said, tokenize=False) == "<b>hi"


def test_a_scratchlm_only_tokenizer_is_exported_and_reported(cli, tmp_path):
    CharTokenizer.of_text([TEXT]).save(tmp_path / "tokenizer")
    write_checkpoint(
        tmp_path / "ours",
        model=build(PLAIN, dtype=torch.float32).state_dict(),
        config=PLAIN,
        tokenizer_file=tmp_path / "tokenizer" / "tokenizer.json",
    )
    status, out, _ = cli("export", tmp_path / "ours", tmp_path / "out")
    assert status == 0
    assert "only scratchlm reads" in out
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_nonfinite_weights_are_imported_only_with_the_flag(cli, tmp_path):
    model = hf_model("llama 3")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "in")
    status, _, err = cli("import", tmp_path / "in", tmp_path / "ours")
    assert (status, err.count("\n")) == (2, 1)
    assert "'lm_head.weight' holds NaN" in err
    assert not (tmp_path / "ours").exists()
    assert cli("import", tmp_path / "in", tmp_path / "ours", "--allow-nonfinite")[0] == 0


def test_user_errors_are_one_line_and_exit_status_2(cli, tmp_path, checkpoint):
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
        status, out, err = cli(*words)
        assert (status, out) == (2, ""), words
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert reason in err
    assert not (tmp_path / "o").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_run_is_exported_as_gguf_with_its_tokenizer_and_imported_again(cli, tmp_path, checkpoint):
    status, out, err = cli("export", tmp_path / "run", tmp_path / "to" / "m.gguf")
    assert (status, err) == (0, "checkpoint: step 5, the last\n")
    assert out == f"{tmp_path}/to/m.gguf: qwen3, 14,128 parameters, with its tokenizer\n"
    assert cli("import", tmp_path / "to" / "m.gguf", tmp_path / "back")[0] == 0
    verify_checkpoint(tmp_path / "back")
    theirs, ours = (
        TransformerLM(read_config(checkpoint)),
        TransformerLM(read_config(tmp_path / "back")),
    )
    theirs.load_state_dict(read_tensors(checkpoint))
    ours.load_state_dict(read_tensors(tmp_path / "back"))
    ids = token_ids(seq=20, vocab=300)
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(ours, ids), rtol=1e-5, atol=1e-5)
    before, after = load_tokenizer(checkpoint), load_tokenizer(tmp_path / "back")
    assert before.fingerprint() == after.fingerprint()
    end = before.special_tokens["<|endoftext|>"]
    assert read_manifest(tmp_path / "back")["metadata"]["eos_token_ids"] == [end]
    status, out, _ = cli("account", tmp_path / "to" / "m.gguf")
    assert (status, "14,128" in out) == (0, True)
    status, out, _ = cli("generate", tmp_path / "to" / "m.gguf", "--prompt", "the", "--seed", "1")
    assert status == 0
    assert out.strip()


def test_a_gguf_file_carries_the_chat_template_in_and_out(cli, tmp_path, checkpoint):
    template = {"chat_template": "{{ messages[0].content }}", "eos_token": "<|endoftext|>"}
    write_checkpoint(
        tmp_path / "ours",
        model=read_tensors(checkpoint),
        config=read_config(checkpoint),
        tokenizer_file=checkpoint / "tokenizer.json",
        tokenizer_config=json.dumps(template).encode(),
    )
    assert cli("export", tmp_path / "ours", tmp_path / "m.gguf")[0] == 0
    assert cli("import", tmp_path / "m.gguf", tmp_path / "back")[0] == 0
    back = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert back.items() >= template.items()
    loaded = load_model(tmp_path / "m.gguf")
    assert loaded.chat_template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_export_quantises_a_gguf_file_and_says_what_stays_wide(cli, tmp_path, tokenizer_file):
    config = FAMILIES["llama"].replace(vocab_size=300, d_model=32, d_ff=64)
    model = build(config, dtype=torch.float32).state_dict()
    write_checkpoint(tmp_path / "m", model=model, config=config, tokenizer_file=tokenizer_file)
    status, out, _ = cli("export", tmp_path / "m", tmp_path / "m.gguf", "--quantize", "q4_0")
    assert status == 0
    assert "q4_0 " in out
    assert "wide " in out
    assert load_model(tmp_path / "m.gguf").is_quantized
    assert cli("import", tmp_path / "m.gguf", tmp_path / "back", "--dtype", "bfloat16")[0] == 0
    assert {t.dtype for t in read_tensors(tmp_path / "back").values()} == {torch.bfloat16}
    assert cli("export", tmp_path / "m", tmp_path / "wide.gguf")[0] == 0
    small = tmp_path / "small"
    assert cli("quantize", tmp_path / "wide.gguf", "--to", "q4_0", "--out", small)[0] == 0
    assert load_tokenizer(small).fingerprint() == load_tokenizer(tmp_path / "m").fingerprint()


def test_what_gguf_cannot_do_is_one_line(cli, tmp_path, checkpoint):
    CharTokenizer.of_text([TEXT]).save(tmp_path / "tokenizer")
    write_checkpoint(
        tmp_path / "chars",
        model=build(PLAIN, dtype=torch.float32).state_dict(),
        config=PLAIN,
        tokenizer_file=tmp_path / "tokenizer" / "tokenizer.json",
    )
    (tmp_path / "there.gguf").write_text("")
    (tmp_path / "bad.gguf").write_text("no such thing")
    small = FAMILIES["mistral"]
    write_checkpoint(tmp_path / "window", model=build(small).state_dict(), config=small)
    o = tmp_path / "o.gguf"
    for words, reason in (
        (("export", checkpoint, tmp_path / "there.gguf"), "there.gguf exists already"),
        (("export", checkpoint, o, "--max-shard-gb", "1"), "--max-shard-gb is for directories"),
        (("export", checkpoint, tmp_path / "o", "--quantize", "q8_0"), "must end in .gguf"),
        (("export", checkpoint, o, "--dtype", "float64"), "choose a dtype"),
        (("export", tmp_path / "chars", o), "GGUF has no tokenizer of single characters"),
        (("export", tmp_path / "window", o), "no sliding window of 5 tokens"),
        (("import", tmp_path / "bad.gguf", o), "does not begin with GGUF"),
        (("import", "nowhere.gguf", o), "nowhere.gguf: no such file"),
        (("generate", tmp_path / "bad.gguf"), "must be a run with a checkpoint"),
    ):
        status, out, err = cli(*words)
        assert (status, out) == (2, ""), words
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert reason in err
    assert not o.exists()


def test_a_damaged_checkpoint_is_not_exported(cli, tmp_path, checkpoint):
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(bytes(data))
    status, _, err = cli("export", checkpoint, tmp_path / "out")
    assert status == 2
    assert "is damaged" in err


def test_reading_a_config_needs_no_torch():
    code = "import sys, scratchlm.interop.hf_config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_help_names_the_families(cli):
    status, out, _ = cli("import", "--help")
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
