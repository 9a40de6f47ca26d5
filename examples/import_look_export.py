"""Bring a Hugging Face model in, look at it, take it out; without a folder, a tiny one."""

import sys
import tempfile
from pathlib import Path

import torch

from scratchlm import PRESETS, ModelConfig, TransformerLM, load_model
from scratchlm.config import Rotary
from scratchlm.inference import next_tokens
from scratchlm.interop import write_hf

folder = Path(tempfile.mkdtemp())
if len(sys.argv) > 1:
    source = Path(sys.argv[1])
else:
    source = folder / "tiny-llama"
    tiny = ModelConfig(256, 64, 32, 2, 4, num_kv_heads=2, positions=Rotary(layout="half"))
    write_hf(source, tiny, TransformerLM(tiny).state_dict())

loaded = load_model(source)
config = loaded.config
print(f"{config.num_layers} layers, d_model {config.d_model}, {config.num_heads} heads")
print("of the same shape as a preset:", [name for name, p in PRESETS.items() if p == config])

for name, weight in list(loaded.model.named_parameters())[:4]:
    print(f"{name:<36} {tuple(weight.shape)!s:<12} std {weight.std().item():.4f}")
for candidate in next_tokens(loaded.model, [1, 2, 3], best=3):
    print(f"token {candidate.token_id}: {candidate.probability:.2%}")

out = folder / "exported"
write_hf(out, config, loaded.model.state_dict())
again = load_model(out)
tokens = torch.randint(config.vocab_size, (1, 8))
assert torch.equal(loaded.model(tokens), again.model(tokens))
print("exported to", out, "and back: the same logits, to the bit")
