"""What a model costs, from Python: numbers with their formulas, before anything is built."""

from scratchlm import PRESETS, ModelConfig, account
from scratchlm.accounting import SYMBOLS

for name in ("gpt2", "llama3.2-1b", "qwen3-0.6b"):
    found = account(PRESETS[name], phase="training", batch=1, context=1024, machine="h100-sxm")
    print(
        f"{name:<12} {found.parameters.unique:>13,} parameters, "
        f"{float(found.memory.training.value) / 2**30:6.1f} GiB to train at batch 1"
    )

found = account(PRESETS["gpt2"], phase="training", batch=8)
forward = found.flops["full"]
print("\na training step of gpt2, batch 8:")
print("feed-forward FLOPs =", forward["feed-forward"].symbols)
for symbol in ("B", "S", "d", "d_ff"):
    print(f"  {symbol:<5}{SYMBOLS[symbol]}")

mine = ModelConfig(50_257, 1024, d_model=1024, num_layers=12, num_heads=16, num_kv_heads=4)
before, after = account(mine.replace(num_kv_heads=16)), account(mine)
saved = before.parameters.unique - after.parameters.unique
print(f"\ngrouped queries save {saved:,} parameters of {before.parameters.unique:,}")
assert saved == 12 * 2 * 1024 * (1024 - 4 * 64)
