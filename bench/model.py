"""One training step on the CPU: ours beside `transformers`' Llama and a GPT of nanoGPT's shape.

    python bench/model.py                  the shape everybody is measured at
    python bench/model.py --shape demo     the demo's
    python bench/model.py --quick          fewer repeats, nothing written

A step is forward, backward, clipping of the gradient's norm, and AdamW. Each model runs eager and
compiled, a step of each in turn; what counts is our best beside the best of the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.data import Batch
from scratchlm.training.learner import Learner
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import take_step
from shakespeare import Peer

# layers, width, heads, d_ff, vocabulary, sequence, batch; and how many steps to measure
SHAPES = {"common": (4, 256, 8, 704, 4096, 256, 16, 12), "demo": (3, 64, 4, 192, 640, 72, 32, 100)}
LAYERS, WIDTH, HEADS, FF, VOCAB, SEQ, BATCH, STEPS = SHAPES["common"]
MODES = ("eager", "compiled")
SHARED = "compiled, a share of the rows for each thread"  # ours alone has it
Step = Callable[[Tensor, Tensor], object]


def ours(mode: str) -> tuple[nn.Module, Step]:
    model = TransformerLM(ModelConfig(VOCAB, SEQ, WIDTH, LAYERS, HEADS, FF))
    how = "off" if mode == "eager" else "model"
    shares = torch.get_num_threads() if mode == SHARED else 1
    learner = Learner(model, TrainConfig(batch_size=BATCH, compile=how, shares=shares))

    def step(tokens: Tensor, targets: Tensor) -> None:
        take_step(learner, Batch(tokens, targets), 1, 1e-4)

    return model, step


def llama(mode: str) -> tuple[nn.Module, Step]:
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
    return model, plain_step(model, lambda ids: model(input_ids=ids, use_cache=False).logits, mode)


def gpt(mode: str) -> tuple[nn.Module, Step]:
    model = Peer(VOCAB, SEQ, WIDTH, LAYERS, HEADS)
    return model, plain_step(model, model.__call__, mode)


def plain_step(model: nn.Module, logits_of: Callable[[Tensor], Tensor], mode: str) -> Step:
    """Train a model as everybody does: cross-entropy, clipping, torch's fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(tokens).flatten(0, 1), targets.flatten())

    loss_of_batch = torch.compile(loss_of) if mode == "compiled" else loss_of

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of_batch(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


MAKERS = {"transformers Llama": llama, "GPT, GELU, fewer weights": gpt, "ours": ours}


def matmul_rate() -> float:
    """FLOP/s of a plain float32 product on this machine, now."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 2048**3 / min(times)


def flops(model: nn.Module, name: str) -> float:
    """6 · weights that multiply + 12 · L · H · d_head · S, per token."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    weights -= SEQ * WIDTH if "GPT" in name else VOCAB * WIDTH  # tables that are looked up
    return BATCH * SEQ * (6 * weights + 12 * LAYERS * WIDTH * SEQ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=list(SHAPES), default="common")
    options = parser.parse_args()
    global LAYERS, WIDTH, HEADS, FF, VOCAB, SEQ, BATCH, STEPS
    LAYERS, WIDTH, HEADS, FF, VOCAB, SEQ, BATCH, STEPS = SHAPES[options.shape]
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    targets = tokens.roll(-1, 1)
    runners = {
        (name, mode): (*make(mode), list[float]())
        for name, make in MAKERS.items()
        for mode in (*MODES, SHARED)[: 3 if name == "ours" else 2]
    }
    rates = [matmul_rate()]
    # Interleaved, so that whatever else the machine does falls on all.
    for round_ in range(4 if options.quick else STEPS + 2):
        for _, step, times in runners.values():
            begin = time.perf_counter()
            step(tokens, targets)
            if round_ >= 2:
                times.append(time.perf_counter() - begin)
        rates.append(matmul_rate())
    rate = max(rates)
    seconds = {who: statistics.median(times) for who, (_, _, times) in runners.items()}
    best_peer = min(value for (name, _), value in seconds.items() if name != "ours")
    rows = [
        [
            f"{name}, {mode}",
            f"{1000 * seconds[name, mode]:.1f}",
            f"{1000 * min(times):.1f}",
            f"{flops(model, name) / seconds[name, mode] / rate:.2f}",
            f"{best_peer / seconds[name, mode]:.2f}",
        ]
        for (name, mode), (model, _, times) in runners.items()
    ]
    header = ["implementation", "ms a step, median", "least", "of the matmul rate"]
    text = (
        f"L{LAYERS} d{WIDTH} h{HEADS} ff{FF} V{VOCAB} S{SEQ} B{BATCH}, float32, "
        f"{options.threads} threads; forward, backward, clipping and fused AdamW; "
        f"{len(times)} interleaved steps; matmul rate {rate / 1e9:.0f} GFLOP/s; FLOPs by "
        "6·N_matmul + 12·L·H·d_head·S per token. Load average at the end: "
        f"{os.getloadavg()[0]:.1f}.\n\n{table([*header, 'speed over the best peer'], rows)}"
    )
    print(text)
    if not options.quick:
        write_section(
            "Training step, CPU" + (": the demo's shape" if options.shape == "demo" else ""),
            f"python bench/model.py --shape {options.shape}",
            machine(),
            versions("torch", "transformers"),
            text,
        )


if __name__ == "__main__":
    main()
