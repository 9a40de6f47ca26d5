"""Loading takes the model's memory and a few megabytes; sixteen bits never become thirty-two."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm import config as c
from scratchlm.interop import write_hf

_LLAMA = ModelConfig(
    vocab_size=16_000,
    context_length=64,
    d_model=1024,
    num_layers=6,
    num_heads=16,
    d_ff=4096,
    positions=c.Rotary(layout="half"),
)
_GPT2 = _LLAMA.replace(
    positions=c.Learned(),
    norm=c.LayerNorm(),
    ffn=c.MLP("gelu_tanh", bias=True),
    attention=c.Attention(bias="all"),
    tie_embeddings=True,
    d_ff=4096,
)
MODELS = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "mixtral": _LLAMA.replace(ffn=c.MoE(4, 2), d_ff=1024, num_layers=5),
}

# Run in a process of its own: the peak of this one is transformers'.
_LOAD = """
import json, sys
import torch
from scratchlm import TransformerLM
from scratchlm.interop import read_hf
from scratchlm.interop.streaming import is_finite

def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

path, how = sys.argv[1:]
checkpoint = read_hf(path)
model = TransformerLM(checkpoint.config, device="meta", dtype=checkpoint.dtype)
# What torch itself loads on first use is not the model's: let it, with a small one.
small = checkpoint.config.replace(vocab_size=9, num_layers=1, d_model=64, num_heads=2)
TransformerLM(small, device="meta").to_empty(device="cpu").state_dict()
is_finite(torch.zeros(2**20, dtype=torch.bfloat16))
before = memory("VmRSS")
if how == "assign":
    model.load_state_dict(dict(checkpoint.tensors()), assign=True)
else:
    model.to_empty(device="cpu")
    checkpoint.load_into(model.state_dict())
size = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({
    "size": size,
    "taken": memory("VmHWM") - before,
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
}))
"""


def write_model(path, config):
    """Write a checkpoint of this config, in shards, in bfloat16."""
    shapes = TransformerLM(config, device="meta").state_dict()
    weights = {n: torch.zeros(t.shape, dtype=torch.bfloat16) + 0.5 for n, t in shapes.items()}
    return write_hf(path, config, weights, max_shard_bytes=50_000_000)


@pytest.mark.parametrize(
    ("name", "how"), [("llama", "assign"), ("gpt2", "in place"), ("mixtral", "assign")]
)
def test_loading_peaks_at_the_models_size_and_a_tenth(name, how, tmp_path):
    directory = write_model(tmp_path / name, MODELS[name])
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(directory), how],
        capture_output=True,
        text=True,
        check=True,
    )
    shutil.rmtree(directory)
    result = json.loads(done.stdout)
    assert result["size"] > 150e6
    assert result["dtypes"] == ["torch.bfloat16"]
    assert result["taken"] < 1.1 * result["size"], result
    print(name, how, round(result["taken"] / result["size"], 3), "× the model")
