"""Learning an adapter: ours beside peft + transformers, at the same batch, in one run.

    python bench/lora.py                               Llama-3.2-1B's shape on a GPU
    python bench/lora.py --tiny                        a trial of the code, on any machine

Random weights, random tokens, no download. The base stands still in bfloat16, the adapter (rank 16,
every Linear of the blocks) is float32, products run under autocast: forward, backward, AdamW. The
peer runs as its users run it, layer by layer, and compiled. Ours runs once more with the layers'
matrices in nf4, and in int8 (QLoRA). `predicted` is what `scratchlm account --lora` says of the
peak memory, and by how much that is off.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers import hugging_face
from results import table, versions, write_section
from scratchlm import ModelConfig, TransformerLM, acceleration
from scratchlm.accounting import Setup
from scratchlm.accounting.lora import lora_memory
from scratchlm.config import PRESETS
from scratchlm.config.lora import LoRA
from scratchlm.data import Batch
from scratchlm.quantization.convert import quantize_base
from scratchlm.quantization.rule import BASES
from scratchlm.training.learner import Learner
from scratchlm.training.lora import apply_lora
from scratchlm.training.settings import TrainConfig
from scratchlm.training.step import backward

Step = Callable[[], Tensor]
RANK, ALPHA = 16, 32.0
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
AIM = 1.5  # times the tokens/s of peft + transformers, in less memory


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tokens_of(config: ModelConfig, batch: int, seq: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(config.vocab_size, (batch, seq + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(
    config: ModelConfig, batch: int, seq: int, device: str, quantize: str | None = None
) -> Step:
    """Make a step as `scratchlm finetune` makes it."""
    model = TransformerLM(config, device=device, dtype=torch.bfloat16)
    if quantize is not None:
        quantize_base(model, quantize)
    elif device == "cuda":
        acceleration.join_weights(model)
    apply_lora(model, LoRA(RANK, ALPHA))
    learner = Learner(model, TrainConfig(batch_size=batch, lr=1e-4, precision="bf16-mixed"))
    inputs, targets = tokens_of(config, batch, seq, "cpu")
    rows = Batch(inputs, targets)
    if device == "cuda":
        rows = Batch(inputs.pin_memory(), targets.pin_memory())  # as a loader hands them out

    def step() -> Tensor:
        loss = backward(learner, rows)
        for optimizer in learner.optimizers:
            optimizer.step()
        return loss

    return step


def peer_step(config: ModelConfig, batch: int, seq: int, device: str, compiled: bool) -> Step:
    """Make a step as peft's users make it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    base = hugging_face(config, device, use_cache=False, attn_implementation="sdpa")
    base = base.to(torch.bfloat16)
    wanted = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS)
    model: Any = peft.get_peft_model(base, wanted)  # its adapters are float32
    model.train()
    learns = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in learns} == {torch.float32}
    optimizer = torch.optim.AdamW(learns, lr=1e-4, fused=device == "cuda")
    inputs, targets = tokens_of(config, batch, seq, device)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(name: str, make: Callable[[], Step], device: str, tokens: int, repeats: int) -> Any:
    """Return tokens/s, ms, peak GiB and the first step's seconds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = make()
    begin = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - begin
    assert loss == loss, "the first loss is NaN"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(5 if device == "cuda" else 0):  # a recording is among these, and its memory
        step()
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    print(
        f"  {name}: {tokens / seconds:,.0f} tokens/s, {seconds * 1e3:.1f} ms, {peak:.2f} GiB, "
        f"first step {first:.1f} s, loss {loss:.3f}",
        flush=True,
    )
    return tokens / seconds, seconds * 1e3, peak, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compiled-peer", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    config = replace(PRESETS["llama3.2-1b"], context_length=max(args.seq, 2048))
    batch, seq = args.batch, args.seq
    if args.tiny:
        config = ModelConfig(300, 64, 64, 2, 4, 128, num_kv_heads=2, tie_embeddings=True)
        batch, seq, args.repeats = 2, 32, 2
    makers: dict[str, Callable[[], Step]] = {
        "peft + transformers": lambda: peer_step(config, batch, seq, device, False),
        "peft + transformers, compiled": lambda: peer_step(config, batch, seq, device, True),
        "ours": lambda: our_step(config, batch, seq, device),
        **{
            f"ours, base in {to}": lambda to=to: our_step(config, batch, seq, device, to)
            for to in BASES
        },
    }
    if args.no_compiled_peer or args.tiny:
        del makers["peft + transformers, compiled"]
    found = {
        name: measure(name, make, device, batch * seq, args.repeats)
        for name, make in makers.items()
    }
    predicted = {}
    for to in (None, *BASES):
        setup = Setup(phase="training", batch=batch, context=seq, quantize=to)
        size = float(lora_memory(config, LoRA(RANK, ALPHA), setup).training.value) / 2**30
        name = "ours" if to is None else f"ours, base in {to}"
        predicted[name] = f"{size:.2f} ({size / found[name][2] - 1:+.1%})"
    first = found["peft + transformers"]
    rows = [
        [
            name,
            f"{rate:,.0f}",
            f"{ms:.1f}",
            f"{peak:.2f}",
            predicted.get(name, ""),
            f"{start:.0f}",
            f"{rate / first[0]:.2f}×",
            f"{AIM}×, less memory; predicted within 5 %" if name == "ours" else "",
        ]
        for name, (rate, ms, peak, start) in found.items()
    ]
    header = ["who", "tokens/s", "ms", "peak GiB", "predicted", "first step, s", "÷ peer", "aim"]
    body = table(header, rows)
    print(body)
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()}, Llama-3.2-1B's shape, {batch} × {seq} tokens"
        with_ = versions("torch", "transformers", "peft")
        write_section("LoRA", "python bench/lora.py", where, with_, body)


if __name__ == "__main__":
    main()
