"""How the threads of a product wait for each other: asleep, before torch is imported."""

from __future__ import annotations

import os


def wait_asleep() -> None:
    """Ask OpenMP for threads that sleep while they wait, unless the user has asked otherwise.

    Threads that spin slow a busy machine to a tenth; on an idle one, waking them costs little.
    OpenMP reads the variable once, when torch is first imported: call this before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
