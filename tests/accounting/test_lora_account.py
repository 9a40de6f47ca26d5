"""The account of an adapter: its size is the real one, and its memory has every part."""

import json

import pytest

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
