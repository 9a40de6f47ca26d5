"""Several GPUs, projected: Llama-3-8B on 8 and 128 H100s by the account, beside published figures.

Arithmetic: nothing is run but the account, and nothing was measured on several GPUs. Writes the
section "Several GPUs: projected" of bench/RESULTS.md.

    python bench/projection.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from scratchlm.accounting import CHECKPOINTING, Execution, Machine, Plan, Setup, machine, mfu, plans
from scratchlm.accounting.machines import NETWORK
from scratchlm.config import preset

sys.path.insert(0, str(Path(__file__).parent))
from results import table, versions, write_section

MODEL, SEQ, GPUS = preset("llama3-8b"), 8_192, (8, 128)
# tokens/s of one H200 on Llama-3.2-1B's shape, 2,048 tokens, batch 4 (docs/speed-log.md)
MEASURED = 70_502
PUBLISHED = [
    ["torchtitan, FSDP", 8, "5,762"],
    ["torchtitan, FSDP, compiled", 8, "6,667"],
    ["torchtitan, FSDP, compiled, float8", 8, "8,532"],
    ["torchtitan, FSDP", 128, "5,605 (97 % kept)"],
    ["torchtitan, FSDP, compiled", 128, "6,514"],
    ["torchtitan, FSDP, compiled, float8", 128, "8,380"],
    ["Megatron-Bridge, FP8", 8, "14,451"],
]


def projected(gpu: Machine, alone: float, batch: int) -> list[Plan]:
    """Return ZeRO-1 and FSDP with the least checkpointing that fits both numbers of GPUs."""
    found = []
    for parallel in ("zero1", "fsdp"):
        for policy in CHECKPOINTING:
            setup = Setup("training", batch, SEQ, execution=Execution(checkpointing=policy))
            ways = plans(MODEL, setup, gpu, alone, counts=GPUS)
            ways = [way for way in ways if way.name == parallel]
            if all(way.fits for way in ways):
                found += ways
                break
    return found


def rows(found: list[Plan]) -> list[list[str]]:
    lines = []
    for plan in found:
        setup, made = plan.setup, plan.projection
        each = [float(item.value) / setup.gpus for item in (made.tokens, made.tokens_overlapped)]
        first = next(p for p in found if replace(setup, gpus=GPUS[0]) == p.setup).projection
        kept = float(made.tokens.value) / setup.gpus / (float(first.tokens.value) / GPUS[0])
        lines.append(
            [
                plan.name,
                f"{setup.gpus}",
                f"{setup.batch}",
                setup.execution.checkpointing,
                f"{plan.memory / 2**30:.1f}",
                f"{float(made.sent.value) / 2**30:.1f}",
                f"{made.share:.1%}",
                f"{each[0]:,.0f}",
                f"{each[1]:,.0f}",
                f"{kept:.1%}" if setup.gpus != GPUS[0] else "",
            ]
        )
    return lines


BODY = """Nothing in this section was measured on several GPUs: Llama-3-8B, {seq:,} tokens, on
H100s as others published it, and as `scratchlm account llama3-8b --gpus N` projects ours.

Published, as their authors state it:

{published}

torchtitan's: end of 2024, batch 2 on each GPU, selective activation checkpointing, H100s of 96 GB
held to 500 W, 400 Gbit/s to other nodes for each GPU.

Ours, **projected**:

{ours}

How: arithmetic takes {formula} seconds, with u = {mfu:.3f} of {peak:.0f} TFLOP/s.
That is what one H200 reached on Llama-3.2-1B's shape: {tokens:,} tokens/s (2,048 tokens, batch 4;
docs/speed-log.md), an MFU of 0.71 of that machine's own bf16 product of 8192³. That it carries over
to a model of 8 B, to sequences of {seq:,}, to an H100 and to a step among other GPUs is an
assumption, and the projection is no better than it; the H100s above are slower machines than the
one it was measured on. Communication takes its bytes over {near:,.0f} GB/s within a node of 8 and,
through 8 adapters of {adapter:.0f} GB/s, {far:,.0f} GB/s beyond; latency is not counted.
Checkpointing: the least under which, by the account, a step fits 80 GiB on 8 and on 128 GPUs; what
it repeats is in the arithmetic.
No FP8 is projected. Kept: tokens/s a GPU of those on 8, where nothing overlaps.
"""


def main() -> None:
    gpu = machine("h100-sxm")
    alone = mfu(MEASURED, preset("llama3.2-1b"), 2_048, gpu).value
    found = [plan for batch in (1, 2) for plan in projected(gpu, alone, batch)]
    header = ["plan", "GPUs", "batch", "checkpointing", "GiB", "sent, GiB", "communication"]
    header += ["tokens/s a GPU, nothing overlaps", "all that can", f"kept at {GPUS[1]}"]
    ours = table(header, rows(found))
    published = table(["published elsewhere", "GPUs", "tokens/s a GPU"], PUBLISHED)
    body = BODY.format(
        seq=SEQ,
        published=published,
        ours=ours,
        formula=found[0].projection.step.children[0].symbols,
        mfu=alone,
        peak=gpu.peak("bf16") / 1e12,
        tokens=MEASURED,
        near=found[0].projection.data_rate / 1e9,
        adapter=NETWORK / 1e9,
        far=found[1].projection.data_rate / 1e9,
    )
    print(published, ours, sep="\n\n")
    command = "python bench/projection.py"
    write_section("Several GPUs: projected", command, "arithmetic", versions(), body)


if __name__ == "__main__":
    main()
