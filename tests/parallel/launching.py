"""Start ranks of this machine's CPU without `torchrun`: forked, from one process that imports."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
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


def launch(ranks, work, out, *, worlds=1):
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
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that are left
            process.wait()
        said.seek(0)
        assert status == 0, said.read()[-4000:]
