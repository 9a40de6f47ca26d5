"""Run `scratchlm` in this process, and put its threads and environment back afterwards."""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

import torch

from scratchlm.cli import main


@dataclass
class Found:
    """What a command printed, and how it ended."""

    status: int
    stdout: str
    stderr: str


def run(*arguments):
    """Run a command as `scratchlm` would."""
    out, err, status, threads = io.StringIO(), io.StringIO(), 0, torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", ["scratchlm", *map(str, arguments)]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            torch.set_num_threads(threads)
    return Found(status, out.getvalue(), err.getvalue())
