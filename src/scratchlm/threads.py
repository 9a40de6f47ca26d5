"""How torch's threads wait for each other on a CPU that other programs use too.

Torch shares every operation out among its threads (OpenMP), and a thread that is done waits for
the others: it spins, for some milliseconds. On an idle machine that is best, a thread that slept
would have to be woken hundreds of times a step. Beside other busy programs it is the worst: the
one who spins takes the core from the one who is waited for.

So we look, four times a second, how many cores others use, and let threads spin only where there
are cores for all of them. The number of threads never changes, nor does any result.

GNU's OpenMP takes its settings from the environment, when torch is loaded, and never again. But it
stops spinning (after 100 rounds instead of 300,000) while it manages more threads than there are
cores. A few threads of our own that sleep bring that about, and their end undoes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

INTERVAL = 0.25  # seconds between two looks
BUSY, FREE = 0.25, 0.12  # cores taken from us: from here on threads sleep; below it they may spin
CALM_LOOKS = 4  # in a row, before threads spin again
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class SleepingThreads:
    """Threads of OpenMP that do nothing, but are counted."""

    def __init__(self, openmp: ctypes.CDLL, count: int) -> None:
        self._end = threading.Event()
        started = threading.Event()
        nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)

        def sleep() -> None:
            openmp.GOMP_parallel(nothing, None, ctypes.c_uint(count + 1), ctypes.c_uint(0))
            started.set()
            self._end.wait()  # OpenMP ends a thread's helpers with the thread

        self._thread = threading.Thread(target=sleep, name="scratchlm-sleepers", daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """End them; OpenMP counts them no longer."""
        self._end.set()
        self._thread.join()


class WaitPolicy:
    """Decides from what other programs use whether threads may spin."""

    def __init__(self, cores: float, threads: int) -> None:
        self.spare = cores - threads
        self.spin = False
        self._calm_looks = CALM_LOOKS - 1  # the first look decides alone

    def look(self, others: float) -> bool:
        """Take the cores others use now; return whether threads may spin."""
        taken = others - self.spare
        self._calm_looks = self._calm_looks + 1 if taken < FREE else 0
        if taken > BUSY:
            self.spin = False
        elif self._calm_looks >= CALM_LOOKS:
            self.spin = True
        return self.spin


def share_cores(device: torch.device) -> None:
    """Let torch's threads sleep, not spin, while other programs need the cores of a CPU."""
    if device.type == "cpu":
        watch_cores()


@cache
def watch_cores() -> bool:
    """Watch who uses the cores, from now on; return whether that can be done in this process.

    It leaves alone who has set OMP_WAIT_POLICY or GOMP_SPINCOUNT, one thread, and systems without
    GNU's OpenMP or /proc.
    """
    if torch.get_num_threads() < 2 or any(name in os.environ for name in _SETTINGS):
        return False
    openmp = find_openmp()
    if openmp is None or busy_seconds() is None:
        return False
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    policy = WaitPolicy(min(float(cores), cpu_quota()), threads)
    sleepers = max(1, cores - threads + 1)
    watch = threading.Thread(
        target=_watch,
        args=(policy, lambda: SleepingThreads(openmp, sleepers)),
        name="scratchlm-cores",
        daemon=True,
    )
    watch.start()
    return True


def _watch(policy: WaitPolicy, put_to_sleep: Callable[[], SleepingThreads]) -> None:
    sleeping: SleepingThreads | None = put_to_sleep()
    before = _clocks()
    while True:
        time.sleep(INTERVAL)
        now = _clocks()
        seconds, busy, own = (b - a for a, b in zip(before, now, strict=True))
        before = now
        if policy.look((busy - own) / seconds):
            if sleeping is not None:
                sleeping.close()
            sleeping = None
        elif sleeping is None:
            sleeping = put_to_sleep()


def _clocks() -> tuple[float, float, float]:
    """Return wall time, the cores' busy time and this process's own, in seconds."""
    return time.monotonic(), busy_seconds() or 0.0, time.process_time()


def busy_seconds() -> float | None:
    """Return how long the cores we may use have been busy, all programs together."""
    try:
        allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
        rows = [line.split() for line in lines]
        ticks = sum(
            sum(int(row[i]) for i in (1, 2, 3, 6, 7, 8))  # all but idle and waiting for a disk
            for row in rows
            if row[:1] and row[0] in allowed
        )
    except (AttributeError, OSError, ValueError, IndexError):  # no Linux, or another /proc
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_quota() -> float:
    """Return the cores a container may use, where it says so."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return float("inf")


def find_openmp() -> ctypes.CDLL | None:
    """Return the GNU OpenMP that torch has loaded, if it is that one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    beside_torch = str(Path(torch.__file__).parent.parent / "torch")
    for path in sorted(paths, key=lambda path: not path.startswith(beside_torch)):
        try:
            openmp = ctypes.CDLL(path)
            openmp.GOMP_parallel.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint,
                ctypes.c_uint,
            ]
            return openmp
        except (OSError, AttributeError):
            continue
    return None
