"""`--device`, and what the choice of a model depends on: the machine's rate and memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from scratchlm.training.choosing import Machine

Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, …, or auto: a GPU where there is one.")
]


def choose_device(name: str) -> torch.device:
    """Return the device of that name, from now on the current one; auto is a GPU if there is one.

    Kernels are launched, and steps recorded, on the current device, wherever their tensors lie.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: there is no CUDA device here")
    if device.type == "cuda" and device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"--device {name}: the CUDA devices here end at cuda:{count - 1}")
        torch.cuda.set_device(device)
    return device


def look_at_machine(device: torch.device) -> Machine:
    """Measure what the choice of a model depends on."""
    import torch

    from scratchlm.training import measure_matmul_rate
    from scratchlm.training.choosing import Machine

    is_gpu = device.type == "cuda"
    rate = measure_matmul_rate(device, "bf16" if is_gpu else "fp32")
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    return Machine(rate, is_gpu, memory)
