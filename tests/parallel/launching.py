"""Start ranks of this machine's CPU without `torchrun`: a launch costs seconds, so few and full."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def free_ports(count):
    """Find ports nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def launch(ranks, work, out, *, worlds=1, timeout=600):
    """Run `at_work.py WORK OUT` as processes 0 … ranks − 1; fail with what the first one said.

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
    started = [
        subprocess.Popen(
            command,
            env={**environment, "PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text[-4000:]
    return said
