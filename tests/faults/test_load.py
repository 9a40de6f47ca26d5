"""The engine and the server under load and abuse at once: nothing is lost, memory stays flat.

The short forms are `tests/serve/test_abuse.py` and `tests/inference/test_engine.py`.
"""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from serve.test_abuse import abort_once, ask_nonsense, disconnecting_streams, nothing_is_left
from serve.tiny_server import memory, tiny_engine, tiny_server
from test_architecture import SRC
from waiting import PATIENCE

SECONDS = 600
FLAT = 20  # MB that a process may grow after the first fifth of that


def abuse(server, seconds, seed):
    """Ask nonsense and leave in the middle, beside streams of which a third are left."""
    counts, errors, end = {"nonsense": 0, "aborts": 0}, [], time.monotonic() + seconds

    def repeat(name, act):
        try:
            while time.monotonic() < end:
                act()
                counts[name] += 1
        except BaseException as error:
            errors.append(error)

    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        rng = [random.Random(seed), random.Random(seed + 1)]
        acts = {
            "nonsense": lambda: ask_nonsense(server, client, rng[0]),
            "aborts": lambda: abort_once(server, rng[1]),
        }
        threads = [threading.Thread(target=repeat, args=item) for item in acts.items()]
        for thread in threads:
            thread.start()
        statuses = asyncio.run(disconnecting_streams(server, 24, seconds, 0.3))
        for thread in threads:
            thread.join()
    nothing_is_left(server)
    assert errors == []
    assert set(statuses) <= {200, 429}
    gc.collect()
    return counts | {"streams": len(statuses)}


@pytest.mark.slow
def test_engine_and_server_under_load_lose_nothing_and_stay_as_large(tried):
    script = str(Path(__file__).with_name("engine_load.py"))
    with subprocess.Popen(
        [sys.executable, script, str(SECONDS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC.parent)},
    ) as engines:
        with tiny_server(engine=tiny_engine(max_rows=32), max_queue=4096) as server:
            first = abuse(server, SECONDS / 5, 0)
            before = memory()
            second = abuse(server, SECONDS * 4 / 5, 2)
            grown = round(memory() - before, 1)
        alone = json.loads(engines.communicate()[0])
    total = {name: first[name] + second[name] for name in first}
    assert min(total.values()) > 0
    assert grown < FLAT
    assert alone["grown_mb"] < FLAT
    for name, count in total.items():
        tried(f"server under load: {name}", count, f"{SECONDS} s; grew by {grown} MB")
    note = f"{SECONDS} s; grew by {alone['grown_mb']} MB"
    tried("engine under load: operations, each answer compared", alone["operations"], note)
