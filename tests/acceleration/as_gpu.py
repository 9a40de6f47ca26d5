"""A CPU taken for a GPU that trains: its Triton kernels then run in the interpreter."""

import importlib
import pkgutil

import torch
from torch.library import CustomOpDef

from scratchlm.accelerate import conditions
from scratchlm.accelerate.kernels import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def register_on_cpu():
    """Let every custom operator of the Triton kernels launch for tensors on a CPU, too."""
    for found in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        module = importlib.import_module(found.name)
        for operator in vars(module).values():
            if isinstance(operator, CustomOpDef) and "cpu" not in operator._backend_fns:
                operator.register_kernel("cpu")(operator._init_fn)


if DEVICE == "cpu":
    register_on_cpu()


def take_for_a_gpu(monkeypatch):
    """Let kernels that train run wherever gradients are on; float64 has none."""
    if DEVICE == "cpu":
        monkeypatch.setattr(conditions, "launches_for", lambda x: True)
