"""Start ranks of this machine's CPU without `torchrun`: a launch costs seconds, so few and full."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def free_ports(count):
    """Find ports nobody listens on, below those that the system gives to connections: a world may
    open its own minutes later.
    """
    ports = []
    for port in random.sample(range(10_000, 32_000), 10 * count):
        with socket.socket() as each, contextlib.suppress(OSError):
            each.bind(("127.0.0.1", port))
            ports.append(port)
    return ports[:count]


def launch(ranks, work, out, *, worlds=1, timeout=600):
    """Run `at_work.py WORK OUT` as processes 0 … ranks − 1; fail with what one that failed said.

    They may form `worlds` worlds one after the other, each with a port of its own.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": ",".join(map(str, free_ports(worlds))),
        "OMP_NUM_THREADS": "1",
        "COUNT": str(ranks),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "at_work.py"), work, str(out)]
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        started = []
        for number, file in enumerate(said):
            own = {**environment, "PROCESS": str(number)}
            started.append(subprocess.Popen(command, env=own, stdout=file, stderr=file))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in started):
            assert time.monotonic() < end, f"{work} took longer than {timeout} s"
            if any(process.poll() for process in started):
                break  # the others would wait for it
            time.sleep(0.05)
        for process, file in zip(started, said, strict=True):
            if process.poll():
                file.seek(0)
                raise AssertionError(file.read()[-4000:])
