"""Models of transformers come in with the same logits; ours go out with the same logits."""

import json

import pytest
import torch
from safetensors.torch import save_file

from interop.hf_models import (
    HF_CONFIGS,
    assert_same_bytes,
    hf_model,
    import_model,
    load_with_transformers,
    logits_of,
    token_ids,
    weights,
)
from scratchlm import TransformerLM
from scratchlm.errors import ScratchLMError
from scratchlm.interop import is_hf_directory, read_hf, streaming, write_hf


def left_padding(ids):
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :5], mask[2, :11] = False, False
    return mask


@pytest.mark.parametrize("family", HF_CONFIGS)
def test_an_imported_model_gives_the_logits_of_transformers(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path)
    assert is_hf_directory(tmp_path)
    ours = import_model(tmp_path)
    ids = token_ids(seq=40)
    torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), rtol=1e-5, atol=1e-5)
    mask = left_padding(ids)
    padded = logits_of(ours, ids, mask)[mask]
    torch.testing.assert_close(padded, logits_of(theirs, ids, mask)[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", HF_CONFIGS)
def test_shards_give_the_same_tensors_as_one_file(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same_bytes(dict(read_hf(tmp_path / "many")), dict(read_hf(tmp_path / "one")))


@pytest.mark.parametrize("family", HF_CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 9_000])
def test_read_then_write_is_byte_identical_and_transformers_loads_it(
    family, max_shard_bytes, tmp_path
):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "in")
    checkpoint = read_hf(tmp_path / "in")
    write_hf(tmp_path / "out", checkpoint.config, dict(checkpoint), max_shard_bytes=max_shard_bytes)
    assert_same_bytes(weights(tmp_path / "out"), weights(tmp_path / "in"))
    again = load_with_transformers(tmp_path / "out")
    # Without its window a Mistral is a Llama, and goes out as one.
    assert family == "mistral full" or type(again) is type(theirs)
    ids = token_ids(seq=40)
    assert torch.equal(logits_of(again, ids), logits_of(theirs, ids))
    back = read_hf(tmp_path / "out")
    assert back.config == checkpoint.config
    assert_same_bytes(dict(back), dict(checkpoint))


@pytest.mark.parametrize("family", ["llama 3.2", "qwen3 moe", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_sixteen_bits_both_ways(family, dtype, tmp_path):
    hf_model(family, dtype).save_pretrained(tmp_path / "in")
    checkpoint = read_hf(tmp_path / "in")
    assert checkpoint.dtype == checkpoint.declared_dtype == dtype
    tensors = dict(checkpoint)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    write_hf(tmp_path / "out", checkpoint.config, tensors)
    assert_same_bytes(weights(tmp_path / "out"), weights(tmp_path / "in"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype)[6:]


@pytest.mark.parametrize("family", ["llama 3", "gpt2", "mixtral"])
def test_another_dtype_is_the_stored_one_converted(family, tmp_path):
    hf_model(family, torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = read_hf(tmp_path)
    stored, wide = dict(checkpoint), dict(checkpoint.tensors(dtype=torch.float32))
    assert_same_bytes(wide, {name: tensor.float() for name, tensor in stored.items()})


@pytest.mark.parametrize("family", ["llama 3", "gpt2", "qwen3 moe"])
def test_load_into_fills_a_model_in_place_in_its_own_dtype(family, tmp_path):
    hf_model(family).save_pretrained(tmp_path)
    checkpoint = read_hf(tmp_path)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = TransformerLM(checkpoint.config, dtype=dtype)
        before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        checkpoint.load_into(model.state_dict())
        state = model.state_dict()
        assert {name: tensor.data_ptr() for name, tensor in state.items()} == before
        assert_same_bytes(dict(state), dict(checkpoint.tensors(dtype=dtype)))


@pytest.mark.parametrize("chunk_bytes", [100, 9_000])
@pytest.mark.parametrize("family", ["llama 3", "gpt2", "mixtral"])
def test_the_size_of_the_pieces_that_are_read_makes_no_difference(
    family, chunk_bytes, tmp_path, monkeypatch
):
    hf_model(family).save_pretrained(tmp_path)
    checkpoint = read_hf(tmp_path)
    expected = dict(checkpoint)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", chunk_bytes)
    state = {name: torch.full(shape, torch.nan) for name, shape in checkpoint.shapes.items()}
    checkpoint.load_into(state)
    assert_same_bytes(state, expected)


def test_load_into_fills_non_contiguous_weights(tmp_path):
    hf_model("llama 3").save_pretrained(tmp_path)
    checkpoint = read_hf(tmp_path)
    state = {name: torch.empty(*shape, 2)[..., 0] for name, shape in checkpoint.shapes.items()}
    checkpoint.load_into(state)
    assert_same_bytes(state, dict(checkpoint))


def test_load_into_a_model_of_other_sizes_is_refused(tmp_path):
    hf_model("llama 3").save_pretrained(tmp_path)
    checkpoint = read_hf(tmp_path)
    deeper = TransformerLM(checkpoint.config.replace(num_layers=3), device="meta")
    with pytest.raises(ValueError, match=r"unexpected 'layers\.2\."):
        checkpoint.load_into(deeper.state_dict())
    wider = TransformerLM(checkpoint.config.replace(d_ff=64))
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.w1\.weight must be \[48, 32\]"):
        checkpoint.load_into(wider.state_dict())
    unreal = TransformerLM(checkpoint.config, device="meta")
    with pytest.raises(ValueError, match="have memory"):
        checkpoint.load_into(unreal.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe"])
def test_fused_experts_are_read_like_experts_one_by_one(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "fused")
    in_memory = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in in_memory
    save_file(in_memory, tmp_path / "fused" / "model.safetensors")
    assert_same_bytes(dict(read_hf(tmp_path / "fused")), dict(read_hf(tmp_path / "single")))


def test_gpt2_is_read_with_and_without_its_prefix_and_with_its_masks(tmp_path):
    theirs = hf_model("gpt2")
    theirs.save_pretrained(tmp_path / "new")
    theirs.save_pretrained(tmp_path / "old")
    stored = {
        name.removeprefix("transformer."): tensor
        for name, tensor in weights(tmp_path / "new").items()
    }
    stored |= {f"h.{i}.attn.bias": torch.ones(1, 1, 40, 40).tril() for i in range(2)}
    stored |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    save_file(stored, tmp_path / "old" / "model.safetensors")
    assert_same_bytes(dict(read_hf(tmp_path / "old")), dict(read_hf(tmp_path / "new")))


def test_tensors_at_odd_bytes_are_read_like_others(tmp_path):
    hf_model("gpt2", torch.bfloat16).save_pretrained(tmp_path)
    expected = {name: tensor.clone() for name, tensor in read_hf(tmp_path)}
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little") + 1  # a space after the header
    moved = size.to_bytes(8, "little") + data[8 : 7 + size] + b" " + data[7 + size :]
    (tmp_path / "model.safetensors").write_bytes(moved)
    assert_same_bytes(dict(read_hf(tmp_path)), expected)


def test_a_stored_head_must_be_the_table_it_is_tied_to(tmp_path):
    hf_model("llama 3.2").save_pretrained(tmp_path)
    stored = weights(tmp_path)
    table = stored["model.embed_tokens.weight"]
    save_file({**stored, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in dict(read_hf(tmp_path))
    other = table.clone()
    other[-1, -1] += 1
    save_file({**stored, "lm_head.weight": other}, tmp_path / "model.safetensors")
    checkpoint = read_hf(tmp_path)
    with pytest.raises(ScratchLMError, match="not the embedding table"):
        dict(checkpoint)
    state = TransformerLM(checkpoint.config).state_dict()
    with pytest.raises(ScratchLMError, match="not the embedding table"):
        checkpoint.load_into(state)


def test_a_config_of_transformers_4_is_the_same_model(tmp_path):
    hf_model("llama 3.1").save_pretrained(tmp_path)
    new = read_hf(tmp_path).config
    table = json.loads((tmp_path / "config.json").read_text())
    rope = table.pop("rope_parameters")
    table["rope_theta"] = rope.pop("rope_theta")
    table["rope_scaling"] = rope
    table["torch_dtype"] = table.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(table))
    old = read_hf(tmp_path)
    assert old.config == new
    assert old.declared_dtype == torch.float32
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_hf(tmp_path).config == new
