"""The entry of `scratchlm`, `python -m scratchlm` and `torchrun -m scratchlm`: the command line."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; while Python starts and ends, Ctrl-C shows no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scratchlm.cli import main as run

    run()


if __name__ == "__main__":
    main()
