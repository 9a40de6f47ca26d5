"""One forward and backward on the CPU: ours beside `transformers`' Llama, eager and compiled.

python bench/model.py                  the shape of bench/RESULTS.md
python bench/model.py --quick          fewer repeats, nothing written
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Rotary

LAYERS, WIDTH, HEADS, FF, VOCAB, SEQ, BATCH = 4, 256, 8, 704, 4096, 256, 16


def ours() -> tuple[torch.nn.Module, object]:
    config = ModelConfig(VOCAB, SEQ, WIDTH, LAYERS, HEADS, FF, positions=Rotary(layout="half"))
    model = TransformerLM(config)
    return model, model.loss


def theirs() -> tuple[torch.nn.Module, object]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


def matmul_rate() -> float:
    """FLOP/s of a plain float32 product on this machine, now."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 2048**3 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    targets = tokens.roll(-1, 1)
    runners = {}
    for mode in ("eager", "compiled"):
        for name, make in (("ours", ours), ("transformers Llama", theirs)):
            model, loss = make()
            step = torch.compile(loss) if mode == "compiled" else loss
            runners[mode, name] = (model, step, [])
    # Interleaved, so that whatever else the machine does falls on both.
    for round_ in range(4 if quick else 16):
        for model, step, times in runners.values():
            model.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            step(tokens, targets).backward()
            if round_ >= 2:
                times.append(time.perf_counter() - begin)
    rate = matmul_rate()
    weights = sum(p.numel() for p in runners["eager", "ours"][0].parameters()) - VOCAB * WIDTH
    flops = BATCH * SEQ * (6 * weights + 12 * LAYERS * WIDTH * SEQ)
    rows = []
    for mode in ("eager", "compiled"):
        peer = statistics.median(runners[mode, "transformers Llama"][2])
        for name in ("transformers Llama", "ours"):
            seconds = statistics.median(runners[mode, name][2])
            rows.append(
                [
                    f"{name}, {mode}",
                    f"{1000 * seconds:.0f}",
                    f"{flops / seconds / rate:.2f}",
                    f"{peer / seconds:.2f}",
                ]
            )
    text = table(["implementation", "ms", "of the matmul rate", "speed over the peer"], rows)
    text = (
        f"L{LAYERS} d{WIDTH} h{HEADS} ff{FF} V{VOCAB} S{SEQ} B{BATCH}, float32; median of "
        f"{len(runners['eager', 'ours'][2])} interleaved steps; matmul rate {rate / 1e9:.0f} "
        f"GFLOP/s; FLOPs by 6·N_matmul + 12·L·H·d_head·S per token.\n\n{text}"
    )
    print(text)
    if not quick:
        write_section(
            "Model: forward and backward, CPU",
            "python bench/model.py",
            machine(),
            versions("torch", "transformers"),
            text,
        )


if __name__ == "__main__":
    main()
