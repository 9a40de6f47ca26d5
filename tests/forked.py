"""Work in a forked child: everything is imported already, and what it changes is changed there."""

import os
import sys

import torch


def run_forked(work, log):
    """Return the exit status of a child that does `work`; what it prints is in a file."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            sys.stdout = sys.stderr = log.open("w", encoding="utf-8")
            torch.set_num_threads(1)  # those of the parent's are not here, and would be waited for
            status = work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
