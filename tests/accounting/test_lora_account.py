"""The account of an adapter: its size is the real one, and its memory has every part."""

import json
from dataclasses import replace

import pytest
import torch

from scratchlm.accounting import Setup, memory
from scratchlm.accounting.lora import lora_memory
from scratchlm.config.lora import LoRA
from scratchlm.training.lora import adapter_tensors, apply_lora
from tiny_models import FAMILIES, build


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_counted_parameters_are_the_adapters(family, targets):
    lora, config = LoRA(rank=3, targets=targets), FAMILIES[family]
    model = build(config)
    apply_lora(model, lora)
    real = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    assert lora_memory(config, lora, Setup(phase="training")).parameters.value == real


def test_an_adapter_takes_less_than_all_weights_and_grows_with_its_rank():
    config = FAMILIES["qwen3"].replace(d_model=512, num_layers=8, vocab_size=32_000)
    setup = Setup(phase="training", batch=4, context=config.context_length)
    small, large = (lora_memory(config, LoRA(rank=rank), setup) for rank in (8, 64))
    assert small.training.value < large.training.value < memory(config, setup).training.value
    assert small.training["base weights"].value == 2 * (
        memory(config, setup).training["weights"].value // 4
    )
    names = {item.name for _, item in small.training.walk()}
    assert not names & {"joined weights", "cast weights", "gradient of the LM head"}


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_a_base_in_few_bits_takes_the_bytes_it_has(to):
    from scratchlm.quantization.convert import held_bytes, quantize_base

    config = FAMILIES["qwen3"].replace(d_model=64, d_ff=128)
    setup = Setup(phase="training", batch=1, context=8, precision="fp32", quantize=to)
    account = lora_memory(config, LoRA(rank=4), setup)
    model = build(config, dtype=torch.float32)
    quantize_base(model, to)
    assert account.training["base weights"].value == held_bytes(model)
    with pytest.raises(ValueError, match="beside nf4 or int8"):
        lora_memory(config, LoRA(rank=4), replace(setup, quantize="q8_0"))


def test_the_command_shows_it(monkeypatch, capsys):
    import sys

    from scratchlm.cli import main

    monkeypatch.setattr(sys, "argv", ["scratchlm", "account", "gpt2", "--lora", "8", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    table = json.loads(capsys.readouterr().out)
    assert table["parameters"]["value"] == 8 * 12 * 2 * (4 * 768 + 768 + 3072)
    assert max(table["moments"].values()) == table["training"]["value"]
