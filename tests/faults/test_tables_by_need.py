"""Tables by position are bounded: what lies beyond them is computed when it is asked for."""

import subprocess
import sys

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate import accelerate
from scratchlm.config import Rotary, Sinusoidal
from scratchlm.inference import Sampling, generate
from scratchlm.model import layers, rotary

SIZES = {"vocab_size": 31, "d_model": 16, "num_layers": 2, "num_heads": 2}
POSITIONS = {"pairs": Rotary(), "halves": Rotary(layout="half"), "sinusoidal": Sinusoidal()}


def build(context, name):
    torch.manual_seed(0)
    config = ModelConfig(context_length=context, positions=POSITIONS[name], **SIZES)
    return TransformerLM(config).eval()


@pytest.mark.parametrize("name", POSITIONS)
def test_beyond_the_table_a_model_is_the_same(monkeypatch, name):
    tokens = torch.randint(31, (2, 24))
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, :5] = False
    whole = build(24, name)
    monkeypatch.setattr(rotary, "TABLE_ELEMENTS", 64)  # 8 positions of heads of 8
    monkeypatch.setattr(layers, "TABLE_ELEMENTS", 64)  # 4 of a width of 16
    short = build(24, name)
    short.load_state_dict(whole.state_dict())
    table = short.position_embeddings.table if name == "sinusoidal" else short.rope.cos
    assert len(table) in (4, 8)
    with torch.no_grad():
        assert torch.equal(short(tokens), whole(tokens))
        assert torch.equal(short(tokens, attention_mask=mask), whole(tokens, attention_mask=mask))
        short.to(torch.float64).to(torch.float32)  # built again, as short as before
        assert torch.equal(short(tokens), whole(tokens))
    for model in (whole, short):
        accelerate(model)
    options = {"max_new_tokens": 15, "sampling": Sampling(temperature=0.0), "eos_ids": ()}
    prompts = [[1, 2, 3], [4]]
    for cached in (True, False):
        one, other = (generate(m, prompts, use_cache=cached, **options) for m in (whole, short))
        assert [g.token_ids for g in one] == [g.token_ids for g in other]


LONG = """
import torch
from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Rotary, Sinusoidal
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024
for positions in (Rotary(), Sinusoidal()):
    config = ModelConfig(vocab_size=31, context_length=2**25, d_model=256, num_layers=1,
                         num_heads=1, positions=positions)
    before = peak()
    model = TransformerLM(config)
    model(torch.zeros(1, 4, dtype=torch.long))
    model.next_token_probabilities(torch.zeros(1, 1, dtype=torch.long))
    grown = peak() - before
    assert grown < 600, (positions, grown)
"""


def test_a_context_of_2_to_the_25_takes_neither_gigabytes_nor_minutes():
    """Before, 34 GB for these heads: in a process of its own, whose memory is counted."""
    done = subprocess.run(
        [sys.executable, "-c", f"import signal; signal.alarm(300)\n{LONG}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
