"""Start one process a GPU: what `torchrun` does, from our own command line."""

from __future__ import annotations

import os
import re
import sys

from scratchlm.errors import ScratchLMError


def launched_ranks() -> int:
    """Return how many processes `torchrun` has started, this one among them; 0: it has not."""
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in given.values():
        return 0
    for name, value in given.items():
        if not re.fullmatch("[0-9]{1,6}", value or ""):
            raise ScratchLMError(f"{name}={value!r} in the environment: torchrun gives a number")
    return int(given["WORLD_SIZE"] or 0)


def check_devices(device: str, gpus: int | None) -> None:
    """Refuse what contradicts ranks: other devices than theirs, or a second launcher."""
    launched = launched_ranks()
    if gpus is not None and launched:
        raise ScratchLMError(f"--gpus {gpus}: torchrun has started {launched} already; one of both")
    if gpus is not None and device not in ("auto", "cuda"):
        raise ScratchLMError(
            f"--gpus {gpus} takes the first GPUs of this machine, not --device {device}; "
            "CUDA_VISIBLE_DEVICES=2,3 chooses others; "
            f"on a CPU: `torchrun --nproc-per-node {gpus} -m scratchlm … --device cpu`"
        )
    if launched > 1 and ":" in device:
        raise ScratchLMError(f"--device {device}: each of several ranks has a GPU of its own")


def relaunch(gpus: int, words: list[str], *, shared: bool = False) -> int:
    """Run a command line of ours as `gpus` ranks on this machine; return the exit status.

    `shared`: ranks may share a GPU.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    found = torch.cuda.device_count()
    if gpus > found and not (shared and found):
        raise ScratchLMError(
            f"--gpus {gpus}: this machine has {found} (train.backend=gloo lets ranks share one); "
            f"on a CPU: `torchrun --nproc-per-node {gpus} -m scratchlm … --device cpu`"
        )
    try:
        main(["--standalone", f"--nproc-per-node={gpus}", "-m", "scratchlm", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:  # the ranks have saved, stopped and said so
        return 128 + error.sigval
    return 0


def without_gpus(words: list[str]) -> list[str]:
    """Take `--gpus N` out of a command line."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--gpus="):
            skip = False
            continue
        skip = word == "--gpus"
        kept += [] if skip else [word]
    return kept
