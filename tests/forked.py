"""Work in a forked child: everything is imported already, and what it changes is changed there."""

import gc
import os
import sys
import tempfile
import time

import torch

from scratchlm.cli import main


def run_forked(work, log):
    """Return the exit status of a child that does `work`; what it prints is in a file."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            sys.stdout = sys.stderr = log.open("w", encoding="utf-8")
            _settle()
            status = work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _settle():
    """Make a child that has just been forked fit for work."""
    gc.freeze()  # the collector would touch, and so copy, every page of the parent
    torch.set_num_threads(1)  # those of the parent's are not here, and would be waited for


def become_command(arguments, environment=()):
    """Be `scratchlm ARGUMENTS` from here on, with the child's own descriptors 0, 1 and 2."""
    status = 99
    try:
        os.environ.update(environment)
        sys.argv = ["scratchlm", *map(str, arguments)]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  open until the child ends
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        _settle()
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


class ForkedCommand:
    """`scratchlm ARGUMENTS` as a process of its own, without the seconds that imports take.

    It has the methods of `subprocess.Popen` that tests use. `prepare` is called there first.
    """

    def __init__(self, *arguments, prepare=lambda: None):
        """Start it; what it prints goes to temporary files."""
        kept = {"mode": "w+", "encoding": "utf-8"}
        self._streams = [tempfile.TemporaryFile(**kept) for _ in range(2)]  # noqa: SIM115
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            for number, stream in enumerate(self._streams, start=1):
                os.dup2(stream.fileno(), number)
            prepare()
            become_command(arguments)

    def poll(self):
        """Return the exit status, None while it is at work."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait_for(self, text):
        """Wait until it has printed a text on stderr."""
        while text not in os.pread(self._streams[1].fileno(), 1 << 20, 0).decode():
            assert self.poll() is None, self.communicate()[1]
            time.sleep(0.005)

    def wait_until_stopped(self):
        """Wait until it has stopped itself (SIGSTOP); what is sent then waits for SIGCONT."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.returncode = os.waitstatus_to_exitcode(status)
            raise AssertionError(self.communicate()[1])

    def send_signal(self, number):
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self):
        """Wait for its end; return what it printed on stdout and on stderr."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        told = []
        for stream in self._streams:
            with stream:
                stream.seek(0)
                told.append(stream.read())
        return told
