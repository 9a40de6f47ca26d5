"""Machines by name: peak FLOP/s, memory, bandwidth, and a rough price per hour.

FLOP/s are the makers' dense figures (no sparsity), accumulation in float32; memory is what
is on the card. Prices are rounded on-demand figures for one GPU in mid-2025, a rough guide: pass
your own. A link is what one GPU sends to the others of its node, in one direction: NVLink,
Infinity Fabric, or PCIe. Between nodes a GPU has one network adapter of 400 Gbit/s, which is an
assumption about the cluster, not a figure of the card.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

PRICES_AS_OF = "mid-2025"
GB, GIB, T = 10**9, 2**30, 10**12
NODE = 8  # GPUs joined by their own links
NETWORK = 50 * GB  # bytes/s out of one GPU to another node


@dataclass(frozen=True)
class Machine:
    """One GPU, or one measured machine."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes/s
    bf16: float | None  # FLOP/s; None: the machine has no such unit
    fp16: float | None
    fp32: float  # without tensor cores
    price: float | None = None  # US dollars an hour
    measured: bool = False
    link: int | None = None  # bytes/s out of one GPU within its node; None: not known

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of matmuls in a precision; float32 means float32, not TF32."""
        if precision == "fp32":
            return self.fp32
        rate = self.fp16 if self.bf16 is None else self.bf16
        return self.fp32 if rate is None else rate

    def peak_name(self, precision: str) -> str:
        """Name the peak that an MFU refers to."""
        if precision == "fp32":
            unit = "fp32"
        else:
            unit = "bf16" if self.bf16 is not None else "fp16" if self.fp16 is not None else "fp32"
        how = "measured" if self.measured else "dense peak"
        return f"{self.name} {unit} {how}, {self.peak(precision) / T:,.4g} TFLOP/s"


def _gpu(
    name: str,
    gib: float,
    gb_per_s: float,
    bf16: float | None,
    fp32: float,
    fp16: float | None = None,
    price: float | None = None,
    link: int | None = None,
) -> Machine:
    def rate(tflops: float | None) -> float | None:
        return None if tflops is None else tflops * T

    half = rate(fp16) if fp16 is not None else rate(bf16)
    memory, bandwidth = int(gib * GIB), gb_per_s * GB
    return Machine(
        name,
        memory,
        bandwidth,
        rate(bf16),
        half,
        fp32 * T,
        price,
        link=None if link is None else link * GB,
    )


def ring_rate(link: float, group: int, in_node: int) -> float:
    """Return the bytes/s a GPU sends in a ring of `group` GPUs, `in_node` of them in each node.

    A ring that leaves its node does so through the adapters of all its GPUs there.
    """
    return link if group <= in_node else min(link, in_node * NETWORK)


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        #    name         GiB    GB/s   bf16    fp32
        _gpu("t4", 16, 320, None, 8.1, fp16=65, price=0.35, link=16),
        _gpu("v100-16", 16, 900, None, 15.7, fp16=125, price=0.60, link=150),
        _gpu("v100-32", 32, 900, None, 15.7, fp16=125, price=0.80, link=150),
        _gpu("a10g", 24, 600, 70, 31.5, price=1.00, link=32),
        _gpu("l4", 24, 300, 121, 30.3, price=0.70, link=32),
        _gpu("l40s", 48, 864, 362, 91.6, price=1.00, link=32),
        _gpu("a100-40", 40, 1_555, 312, 19.5, price=1.30, link=300),
        _gpu("a100-80", 80, 2_039, 312, 19.5, price=1.80, link=300),
        _gpu("h100-pcie", 80, 2_000, 756, 51.2, price=2.40, link=64),
        _gpu("h100-sxm", 80, 3_350, 989, 66.9, price=3.00, link=450),
        _gpu("h200", 141, 4_800, 989, 66.9, price=3.80, link=450),
        _gpu("b200", 180, 8_000, 2_250, 75, price=5.00, link=900),
        _gpu("rtx3090", 24, 936, 71, 35.6, price=0.25, link=32),
        _gpu("rtx4090", 24, 1_008, 165, 82.6, price=0.40, link=32),
        _gpu("rtx5090", 32, 1_792, 209.5, 104.8, price=0.70, link=64),
        _gpu("mi300x", 192, 5_300, 1_307, 163.4, price=2.50, link=448),
    )
}


def machine(name: str) -> Machine:
    """Return a machine by name; for an unknown name, suggest the closest one."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = {"a100": "a100-80", "h100": "h100-sxm", "v100": "v100-32"}.get(key, key)
    if key in MACHINES:
        return MACHINES[key]
    near = difflib.get_close_matches(key, MACHINES, n=1, cutoff=0.0)
    raise ValueError(f"unknown GPU {name!r}; did you mean {near[0]!r}? ({', '.join(MACHINES)})")
