"""How the threads of a product wait for each other: a moment awake, then asleep."""

from __future__ import annotations

import os

SPINS = "50000"  # somewhat under a millisecond


def wait_briefly() -> None:
    """Ask OpenMP for threads that soon fall asleep, unless the user has asked otherwise.

    Left alone they spin for several milliseconds: beside two busy processes, on two cores, a
    training step of a small model takes five times as long as on idle ones; so, 2.5 times. Asleep
    at once, which a busy machine likes best, they double the step on an idle one. OpenMP reads the
    variable once, when torch is first imported: call this before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
