"""What every test stands on: fixed seeds, and a CPU that does not die on bfloat16."""

import os

# Some CPUs announce matrix instructions that the machine then refuses; must precede torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,  # a timing never decides whether a test passes
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
