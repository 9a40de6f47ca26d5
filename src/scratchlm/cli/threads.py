"""OpenMP's idle threads: how long they spin before they sleep."""

from __future__ import annotations

import os

SPIN_COUNT = "50000"  # somewhat under a millisecond


def limit_openmp_spinning() -> None:
    """Make idle OpenMP threads sleep soon, unless the user has set OMP_WAIT_POLICY.

    By default they spin for several milliseconds: beside two busy processes, on two cores, a
    training step of a small model takes 5 times as long as on an idle machine; with this limit,
    2.5 times. No spinning at all is best on a busy machine but doubles the step on an idle one.
    OpenMP reads the variable once, when torch is first imported: call this before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
