"""Adapters to and from PEFT: the same logits, the same learning."""

import json
import warnings

import pytest
import torch

from interop.hf_models import hf_model, import_model, load_with_transformers, token_ids
from scratchlm.config import Rotary
from scratchlm.config.lora import LoRA
from scratchlm.errors import ScratchLMError
from scratchlm.inference.adapters import merge_into
from scratchlm.interop import write_hf
from scratchlm.interop.peft import Adapter, read_peft, write_peft
from scratchlm.model import Linear
from scratchlm.training.lora import (
    adapter_tensors,
    apply_lora,
    load_adapter,
    lora_layers,
    merge,
    remove_lora,
    set_adapters,
    unmerge,
)
from tiny_models import FAMILIES, build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


def randomise(model, seed=3):
    """Give every adapter's tensor noise: a fresh one changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if "lora_" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def adapter_of(model, config):
    return Adapter(config, adapter_tensors(model))


@pytest.fixture
def saved(tmp_path):
    """Save a family's tiny model; return its directory and ours and theirs, loaded."""

    def make(family):
        hf_model(family).save_pretrained(tmp_path / "base")
        theirs = load_with_transformers(tmp_path / "base")
        return import_model(tmp_path / "base"), theirs

    return make


TARGETS = {
    "llama 3.2": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "llama 3": ["q_proj", "lm_head"],  # whose own weight PEFT keeps beside the adapter
    "llama biases": [*ATTENTION, "down_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "mistral": "all-linear",
    "gpt2": ["c_attn", "attn.c_proj", "c_fc"],
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_of_peft_gives_the_same_logits_here(family, kind, saved, tmp_path):
    ours, theirs = saved(family)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=TARGETS[family],
        fan_in_fan_out=family == "gpt2",
        alpha_pattern={"q_proj": 3} if kind == "lora" and family == "llama 3.2" else {},
        **KINDS[kind],
    )
    adapted = peft.get_peft_model(theirs, config)
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_peft(tmp_path / "adapter", ours.config)
    before = ours(token_ids())
    load_adapter(ours, adapter.config, adapter.tensors, scales=adapter.scales)
    with torch.no_grad():
        expected = adapted.eval()(token_ids()).logits
        assert (ours(token_ids()) - before).abs().max() > 0.1
        torch.testing.assert_close(ours(token_ids()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(family, kind, saved, tmp_path):
    ours, theirs = saved(family)
    words = () if family != "gpt2" else ("q_proj", "k_proj", "v_proj", "w2")
    config = LoRA(4, 6.0, targets=words, rslora=kind == "rslora", dora=kind == "dora")
    apply_lora(ours, config)
    randomise(ours)
    write_peft(tmp_path / "adapter", ours.config, adapter_of(ours, config), "base")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = adapted(token_ids()).logits
        torch.testing.assert_close(ours(token_ids()), expected, atol=1e-5, rtol=1e-5)
    again = read_peft(tmp_path / "adapter", ours.config)
    if family != "gpt2":  # whose c_attn comes back as three adapters of the summed rank
        assert again.tensors.keys() == adapter_tensors(ours).keys()
        for name, tensor in adapter_tensors(ours).items():
            assert torch.equal(again.tensors[name], tensor), name


def test_channels_of_queries_and_keys_are_reordered_with_their_adapters(tmp_path):
    config = FAMILIES["qwen3"].replace(positions=Rotary(1e6, "interleaved"))
    ours = build(config, dtype=torch.float32)
    write_hf(tmp_path / "base", config, ours.state_dict())
    lora = LoRA(4, 6.0, dora=True)
    apply_lora(ours, lora)
    randomise(ours)
    write_peft(tmp_path / "adapter", config, adapter_of(ours, lora))
    theirs = load_with_transformers(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ids = token_ids(vocab=config.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), adapted(ids).logits, atol=1e-5, rtol=1e-5)
    again = read_peft(tmp_path / "adapter", config)
    assert all(torch.equal(again.tensors[n], t) for n, t in adapter_tensors(ours).items())


@pytest.mark.parametrize(
    ("kind", "dropout"), [("lora", 0.0), ("rslora", 0.3), ("dora", 0.0), ("dora", 0.3)]
)
def test_twenty_steps_from_one_start_give_the_same_losses_and_adapters(
    kind, dropout, saved, tmp_path
):
    ours, theirs = saved("llama 3.2")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=[*ATTENTION], **KINDS[kind]
    )
    adapted = peft.get_peft_model(theirs, config)
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "start")
    start = read_peft(tmp_path / "start", ours.config)
    load_adapter(ours, start.config, start.tensors)
    assert start.config.dropout == dropout
    ours.train()
    adapted.train()
    learn = [p for p in ours.parameters() if p.requires_grad]
    assert len(learn) == len(start.tensors)
    mine = torch.optim.AdamW(learn, lr=1e-2)
    other = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(20):
        ids = token_ids()
        torch.manual_seed(step)  # both draw what they drop layer by layer, in one order
        loss = ours.loss(ids[:, :-1], ids[:, 1:])
        torch.manual_seed(step)
        logits = adapted(ids[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append((loss.item(), expected.item()))
        for one, optimizer in ((loss, mine), (expected, other)):
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
    got, expected = map(torch.tensor, zip(*losses, strict=True))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert got[-1] < got[0]
    adapted.save_pretrained(tmp_path / "end")
    end = read_peft(tmp_path / "end", ours.config)
    for name, tensor in adapter_tensors(ours).items():
        torch.testing.assert_close(tensor, end.tensors[name], atol=1e-4, rtol=1e-3)


# The layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_no_bit(kind, dtype):
    model = build(FAMILIES["qwen3"], dtype=dtype)
    ids = token_ids(vocab=model.config.vocab_size)
    before, state = model(ids), model.state_dict()
    apply_lora(model, LoRA(4, rslora=kind == "rslora", dora=kind == "dora"), dtype=dtype)
    assert torch.equal(model(ids), before)
    assert state.keys() < model.state_dict().keys()
    remove_lora(model)
    assert torch.equal(model(ids), before)
    assert model.state_dict().keys() == state.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_unmerged_and_unmerging_restores_every_bit(kind):
    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    ids = token_ids(vocab=model.config.vocab_size)
    apply_lora(model, LoRA(4, rslora=kind == "rslora", dora=kind == "dora"))
    randomise(model)
    before = model(ids)
    merge(model)
    torch.testing.assert_close(model(ids), before, atol=1e-5, rtol=1e-5)
    unmerge(model)
    assert torch.equal(model(ids), before)
    merge(model)
    remove_lora(model)
    torch.testing.assert_close(model(ids), before, atol=1e-5, rtol=1e-5)


def test_several_adapters_share_one_base():
    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    ids = token_ids(vocab=model.config.vocab_size)
    plain, outputs = model(ids), {}
    for name, targets in (("one", ("q_proj",)), ("two", ("layers.0.*",))):
        apply_lora(model, LoRA(4, targets=targets), name=name)
        randomise(model, seed=len(name))
        set_adapters(model, [name])
        outputs[name] = model(ids)
    set_adapters(model, [])
    assert torch.equal(model(ids), plain)
    for name, expected in list(outputs.items())[1:]:
        set_adapters(model, [name])
        assert torch.equal(model(ids), expected)
    set_adapters(model, ["one", "two"])
    both = model(ids)
    assert not torch.equal(both, outputs["two"])
    merge(model)
    torch.testing.assert_close(model(ids), both, atol=1e-5, rtol=1e-5)
    unmerge(model)
    with pytest.raises(ScratchLMError, match="no adapter 'three'"):
        set_adapters(model, ["three"])


def test_dropout_acts_in_training_alone():
    model = build(FAMILIES["qwen3"], dtype=torch.float32).train()
    ids = token_ids(vocab=model.config.vocab_size)
    apply_lora(model, LoRA(4, dropout=0.5))
    randomise(model)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_only_the_adapter_learns():
    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    names = apply_lora(model, LoRA(4, targets=("q_proj", "w2")))
    assert all(name.endswith(("q_proj", "w2")) for name in names)
    assert set(lora_layers(model)) == set(names)
    ids = token_ids(vocab=model.config.vocab_size)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    learnt = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learnt == {f"{name}.lora_{part}.default" for name in names for part in "AB"}


def test_the_factor_is_written_as_it_is(tmp_path):
    assert LoRA(rank=4, alpha=6.0).scale == 1.5
    assert LoRA(rank=4, alpha=6.0, rslora=True).scale == 3.0
    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    config = LoRA(4, 6.0, rslora=True)
    apply_lora(model, config)
    write_peft(tmp_path / "adapter", model.config, adapter_of(model, config))
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (table["r"], table["lora_alpha"], table["use_rslora"]) == (4, 6.0, True)
    assert table["rank_pattern"] == table["alpha_pattern"] == {}


def test_any_kind_of_linear_can_be_adapted():
    """A quantised layer computes its own part: here one that rounds its weights to eighths."""

    class Rounded(Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, (self.weight * 8).round() / 8)

    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    for layer in model.layers:
        layer.attn.q_proj.__class__ = Rounded
    ids = token_ids(vocab=model.config.vocab_size)
    before = model(ids)
    apply_lora(model, LoRA(4, targets=("q_proj",)))
    assert torch.equal(model(ids), before)
    assert isinstance(model.layers[0].attn.q_proj, Rounded)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    randomise(model)
    assert not torch.equal(model(ids), before)
    remove_lora(model)
    assert type(model.layers[0].attn.q_proj) is Rounded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"bias": "all"}, "bias must be none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"r": 5}, r"must have lora_A \[5, 32\]"),
        ({"r": "x"}, "rank must be a whole number"),
        ({"rank_pattern": {"(a+)+$": 4}}, "plain name"),
        ({"use_dora": True}, "does not fit use_dora"),
        ({"target_modules": 3}, "target_modules must be names"),
    ],
)
def test_what_does_not_fit_is_one_line(change, message, tmp_path):
    model = build(FAMILIES["qwen3"].replace(d_model=32), dtype=torch.float32)
    config = LoRA(4, targets=("q_proj",))
    apply_lora(model, config)
    write_peft(tmp_path / "adapter", model.config, adapter_of(model, config))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ScratchLMError, match=message) as refused:
        read_peft(tmp_path / "adapter", model.config)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_lm_head_that_an_adapter_came_with_must_be_the_models_own(saved, tmp_path):
    ours, theirs = saved("llama 3")
    config = peft.LoraConfig(target_modules=["lm_head"])
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    adapter = read_peft(tmp_path / "adapter", ours.config)
    for dtype in (torch.float32, torch.bfloat16):
        merge_into(ours.to(dtype), adapter, "here")
    with torch.no_grad():
        ours.lm_head.weight[3, 5] += 1
    with pytest.raises(ScratchLMError, match="here: the adapter's base has another lm_head"):
        merge_into(ours, adapter, "here")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    model = build(FAMILIES["qwen3"], dtype=torch.float32)
    apply_lora(model, LoRA(4))
    write_peft(tmp_path / "adapter", model.config, adapter_of(model, LoRA(4)))
    smaller = model.config.replace(num_layers=1)
    with pytest.raises(ScratchLMError, match="tensors of no layer of this model"):
        read_peft(tmp_path / "adapter", smaller)
    with pytest.raises(ScratchLMError, match="no Linear is called 'z_proj'"):
        apply_lora(build(FAMILIES["qwen3"]), LoRA(targets=("z_proj",)))
