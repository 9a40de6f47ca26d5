"""What tests of GPU kernels share: where they run, what calls them, what they compile to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scratchlm.accelerate import conditions, hopper


def is_hopper():
    return torch.cuda.is_available() and hopper.is_hopper(torch.cuda.current_device())


on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU and a known Triton")


def register_on_cpu(operations):
    """Let custom ops run on a CPU, where there is no GPU: by what launches them, interpreted."""
    if not torch.cuda.is_available():
        for operation, launch in operations.items():
            operation.register_kernel("cpu")(launch)


def use_kernels_on_cpu(monkeypatch):
    """Let a CPU count as a GPU that trains by kernels."""
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: torch.is_grad_enabled())


def relative_error(got, expected):
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def compiled_lines(program, *arguments):
    """Return what a program beside this file prints, compiling without Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()
