"""A model by name: what is loaded is what was written, and what is wrong is one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.tiny import END, byte_tokenizer, tiny_model
from interop.hf_models import hf_model
from scratchlm import TransformerLM
from scratchlm.accelerate.models import AcceleratedTransformerLM
from scratchlm.checkpoint import checkpoint_path, write_checkpoint
from scratchlm.errors import ScratchLMError
from scratchlm.inference import load_model
from scratchlm.interop import write_hf
from tiny_models import FAMILIES, build


def write(run, step, model, tokenizer=True):
    file = byte_tokenizer().save(run / "tok") if tokenizer else None
    return write_checkpoint(
        checkpoint_path(run, step),
        model=model.state_dict(),
        config=model.config,
        tokenizer_file=file,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_every_family_gives_the_same_logits(tmp_path, family):
    model = build(FAMILIES[family])
    loaded = load_model(write(tmp_path, 1, model, tokenizer=False))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids), model(ids))
    assert loaded.config == model.config
    assert loaded.tokenizer is None
    with pytest.raises(ScratchLMError, match="text needs a tokenizer"):
        loaded.need_tokenizer()


@pytest.mark.parametrize("accelerated", [True, False])
def test_a_loaded_model_is_accelerated_unless_told_not_to(tmp_path, accelerated):
    path = write(tmp_path, 1, tiny_model(), tokenizer=False)
    model = load_model(path, accelerate=accelerated).model
    assert (type(model) is AcceleratedTransformerLM) == accelerated
    assert (type(model) is TransformerLM) != accelerated
    assert torch.equal(model(torch.tensor([[1, 2]])), tiny_model()(torch.tensor([[1, 2]])))


def test_a_run_gives_its_newest_whole_checkpoint(tmp_path):
    old, new = tiny_model(vocab_size=257, seed=1), tiny_model(vocab_size=257, seed=2)
    write(tmp_path, 10, old)
    newest = write(tmp_path, 20, new)
    loaded = load_model(tmp_path)
    assert loaded.source == newest
    assert torch.equal(loaded.model.lm_head.weight, new.lm_head.weight)
    assert loaded.need_tokenizer().encode("hi") == [104, 105]
    assert loaded.eos_ids == (byte_tokenizer().special_tokens[END],)
    heard = []
    (newest / "model.safetensors").write_bytes(b"broken")
    fallback = load_model(tmp_path, warn=heard.append)
    assert torch.equal(fallback.model.lm_head.weight, old.lm_head.weight)
    assert len(heard) == 1
    assert "step-00000020" in heard[0]


def test_a_hugging_face_directory_gives_its_logits_and_its_end_tokens(tmp_path):
    theirs = hf_model("llama 3.1")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    loaded = load_model(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids), theirs(ids).logits, atol=1e-5)
    assert loaded.eos_ids == (7, 9)


def test_an_imported_model_keeps_its_end_tokens(tmp_path):
    model = tiny_model()
    metadata = {"eos_token_ids": [7, 9]}
    state = model.state_dict()
    path = write_checkpoint(tmp_path / "in", model=state, config=model.config, metadata=metadata)
    assert load_model(path).eos_ids == (7, 9)


def test_the_dtype_is_the_stored_one_unless_another_is_asked_for(tmp_path):
    hf_model("llama 2", torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).model.lm_head.weight.dtype == torch.bfloat16
    wide = load_model(tmp_path, dtype=torch.float32).model
    assert wide.lm_head.weight.dtype == torch.float32
    assert wide.rope.cos.dtype == torch.float32


def is_mapped(weight, file):
    """Whether a weight is a part of the file, not a copy: the file's tensors are one storage."""
    return weight.untyped_storage().nbytes() == file.stat().st_size


def test_weights_are_the_files_pages_and_writing_to_them_leaves_the_file_alone(tmp_path):
    hf_model("llama 2", torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    before, model = file.read_bytes(), load_model(tmp_path).model
    assert all(is_mapped(weight, file) for weight in model.parameters())
    model.lm_head.weight.zero_()
    assert not load_model(tmp_path).model.lm_head.weight.eq(0).all()
    assert file.read_bytes() == before


def test_a_model_outlives_the_file_that_is_exchanged_under_its_name(tmp_path):
    hf_model("llama 2", torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    other = tmp_path / "beside"
    other.write_bytes(b"")
    other.replace(tmp_path / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_where_in_a_file_the_weights_begin(tmp_path, dtype):
    hf_model("llama 2", dtype).save_pretrained(tmp_path)
    file, ids = tmp_path / "model.safetensors", torch.tensor([[1]])
    tensors, found, mapped = load_file(file), [], set()
    for padding in range(0, 64, 8):
        save_file(tensors, file, {"padding": "-" * padding})
        model = load_model(tmp_path, accelerate=False).model
        found.append(model(ids))
        mapped.add(is_mapped(model.lm_head.weight, file))
    assert all(torch.equal(logits, found[0]) for logits in found)
    assert mapped == ({True} if dtype == torch.bfloat16 else {True, False})


def test_what_is_no_model_is_one_line(tmp_path):
    with pytest.raises(ScratchLMError, match=r"no such run, checkpoint, .* or GGUF file"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ScratchLMError, match="must be a run with a checkpoint"):
        load_model(tmp_path)
    path = write(tmp_path, 1, tiny_model(vocab_size=257))
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ScratchLMError, match=r"model\.safetensors"):
        load_model(path)


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path):
    model = tiny_model()
    state = dict(model.state_dict())
    weight = state.pop("lm_head.weight")
    for i, (change, message) in enumerate(
        [
            ({}, r"missing 'lm_head\.weight'"),
            ({"lm_head.weight": weight[:5].clone()}, r"lm_head\.weight must be \[61, 32\]"),
            ({"lm_head.weight": weight, "extra": weight.clone()}, "unexpected 'extra'"),
        ]
    ):
        path = checkpoint_path(tmp_path, i)
        write_checkpoint(path, model={**state, **change}, config=model.config)
        with pytest.raises(ScratchLMError, match=message):
            load_model(path)


def test_weights_lie_in_the_file_or_in_one_block_each_at_a_multiple_of_64_bytes(tmp_path):
    """One block can be in large pages; and loading again takes other memory."""
    model = build(FAMILIES["gpt2"], dtype=torch.float32)
    write_hf(tmp_path / "hf", model.config, model.state_dict())
    first, second = (load_model(tmp_path / "hf").model for _ in range(2))
    blocks = [{w.untyped_storage().data_ptr() for w in m.parameters()} for m in (first, second)]
    assert [len(block) for block in blocks] == [2, 2]
    assert blocks[0].isdisjoint(blocks[1])
    assert all(w.data_ptr() % 64 == 0 for w in first.parameters())
    with torch.no_grad():
        first.lm_head.tied_to[0].weight.zero_()  # weights may be written
    for name, weight in second.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
