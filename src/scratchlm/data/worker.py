"""A worker process of `prepare`: parts in on stdin, counts out on stdout, one JSON line each.

Started as `python -m scratchlm.data.worker`. A plain program instead of `multiprocessing` needs
no `__main__` guard in the caller's script and inherits no threads or locks from it. It ends when
its stdin does, so it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from scratchlm.data.encoding import EncodeOptions, encode_part, part_from_dict
from scratchlm.errors import ScratchLMError


def main() -> None:
    """Answer every part with its counts or an error."""
    from scratchlm.tokenizer import load_tokenizer

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything else that prints must not mix with the answers
    parent = os.getppid()
    setup = json.loads(sys.stdin.readline())
    options = EncodeOptions(**setup["options"])
    tokenizer = load_tokenizer(setup["tokenizer"])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            counts = encode_part(
                part_from_dict(request["part"]),
                tokenizer,
                options,
                Path(request["path"]),
                between_pieces=lambda: _exit_if_orphaned(parent),
            )
            answer: dict[str, object] = {"counts": asdict(counts)}
        except (ScratchLMError, ValueError, TypeError) as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"errno": error.errno, "error": error.strerror, "file": error.filename}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _exit_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
