"""The processes that train together: who they are, and how they agree.

`torchrun` starts one process a GPU and says in the environment which one each is. Ranks are laid
on a grid of (data, tensor): those of one row hold parts of the same weights, those of one column
read different rows of a batch.

Two ways to talk. Collectives of the step run on the GPU (NCCL) or the CPU (gloo). What the ranks
agree on between steps (how many targets, whether to stop, whether to save) goes over gloo; what a
checkpoint's writers tell each other goes through the store of `torchrun`, from any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratchlm.errors import ScratchLMError

POLL_SECONDS = 0.02
# What torch says when another rank is gone or late; it has no class of error for it.
COLLECTIVE = r"gloo|nccl|timed out|connection (closed|reset)|broken pipe"


@dataclass
class Ranks:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # (data, tensor)
    control: dist.ProcessGroup  # gloo, of all ranks
    store: dist.Store
    timeout: float  # seconds that a rank waits for another
    per_machine: int = 1  # ranks of one machine
    context_size: int = 1  # how many of a column, side by side, share the sequences of a batch
    has_failed: bool = False  # whether this rank is ending: its threads wait for nobody any more
    _asked: dict[str, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it prints, writes logs and prunes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which part of a batch is this rank's."""
        return self.mesh.get_local_rank("data")

    @property
    def data_size(self) -> int:
        """How many ranks share a batch."""
        return self.mesh["data"].size()

    @property
    def row_rank(self) -> int:
        """Which rows of a batch this rank reads, whole or in part."""
        return self.data_rank // self.context_size

    @property
    def row_size(self) -> int:
        """How many parts the rows of a batch are shared out in."""
        return self.data_size // self.context_size

    @property
    def context_rank(self) -> int:
        """Which part of each sequence is this rank's."""
        return self.data_rank % self.context_size

    @property
    def tensor_rank(self) -> int:
        """Which part of each weight is this rank's."""
        return self.mesh.get_local_rank("tensor")

    @property
    def tensor_size(self) -> int:
        """How many ranks share the weights."""
        return self.mesh["tensor"].size()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold what this one holds, for other rows."""
        return self.mesh.get_group("data")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that hold the other parts of these weights."""
        return self.mesh.get_group("tensor")

    # What ranks agree on between steps

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over the ranks that read different rows, in float64."""
        count = 1 if self.tensor_rank == 0 else 0  # those of one row read the same
        given = torch.tensor([value * count for value in values], dtype=torch.float64)
        with self.naming_the_missing():
            dist.all_reduce(given, group=self.control)
        return given.tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        given = torch.tensor(float(flag))
        with self.naming_the_missing():
            dist.all_reduce(given, dist.ReduceOp.MAX, group=self.control)
        return bool(given)

    def first_says(self, flag: bool) -> bool:
        """Whether it is so on the first rank: its clock and its files decide."""
        return self.any(flag and self.is_first)

    def from_first(self, value: Any) -> Any:
        """Return what the first rank says, a JSON value, however long it takes to find out.

        If that rank ends, the launcher ends the others.
        """
        if self.size == 1:
            return value
        number = self._asked["from-first"] = self._asked.get("from-first", 0) + 1
        name = f"from-first/{number}"
        with self.naming_the_missing():
            if self.is_first:
                self.store.set(name, json.dumps(value))
            while not self.store.check([name]):
                time.sleep(POLL_SECONDS)
            return json.loads(self.store.get(name))

    # What ranks tell each other, from any thread

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank; no collective of a step is involved."""
        number = self._asked[key] = self._asked.get(key, 0) + 1
        names = [f"{key}/{number}/{rank}" for rank in range(self.size)]
        with self.naming_the_missing():
            self.store.set(names[self.rank], json.dumps(value))
            deadline = time.monotonic() + self.timeout
            while not self.store.check(names):
                if time.monotonic() > deadline or self.has_failed:
                    missing = [
                        rank for rank, name in enumerate(names) if not self.store.check([name])
                    ]
                    raise ScratchLMError(
                        f"rank {', '.join(map(str, missing))} did not answer within "
                        f"{self.timeout:g} s, or this one is ending ({key})"
                    )
                time.sleep(POLL_SECONDS)
            if number > 1:  # whoever has answered now has read what was said before
                self.store.delete_key(f"{key}/{number - 1}/{self.rank}")
            return [json.loads(self.store.get(name)) for name in names]

    # Faults

    def beat(self, step: float) -> None:
        """Note how far this rank is, in steps, so that others can say who is behind."""
        self.store.set(f"step/{self.rank}", str(step))

    @contextlib.contextmanager
    def naming_the_missing(self) -> Iterator[None]:
        """Turn a collective that failed into an error that names the ranks that are behind."""
        try:
            yield
        except RuntimeError as error:
            is_gone = isinstance(error, dist.DistError)  # the store, with the process that has it
            if not is_gone and not re.search(COLLECTIVE, str(error), re.IGNORECASE):
                raise
            why = " ".join(str(error).split())[:120]
            raise ScratchLMError(f"{self._who_is_behind()}; the job ends ({why})") from None

    def _who_is_behind(self) -> str:
        steps = {}
        with contextlib.suppress(RuntimeError):  # the store lives in the launcher
            for rank in range(self.size):
                known = self.store.check([f"step/{rank}"])
                steps[rank] = float(self.store.get(f"step/{rank}")) if known else 0.0
        late = [rank for rank, step in steps.items() if step < max(steps.values())]
        if not late:
            return f"another rank is gone, or did not answer within {self.timeout:g} s"
        which = f"rank {', '.join(map(str, late))}"
        return (
            f"{which} stopped in step {int(steps[late[0]])}: gone, or silent for {self.timeout:g} s"
        )


@cache
def join_for_good(device_type: str, tensor_size: int) -> Ranks:
    """Join once, all ranks sharing one model, until this process ends."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != tensor_size:
        raise ScratchLMError(
            f"tp={tensor_size} needs as many ranks, started by "
            f"`torchrun --nproc-per-node {tensor_size}`; there are {size}"
        )
    joined = join_ranks(device_type, tensor_size)
    atexit.register(joined.__exit__, None, None, None)
    return joined.__enter__()


@contextlib.contextmanager
def join_ranks(
    device_type: str,
    tensor_size: int = 1,
    timeout: float = 600.0,
    backend: str | None = None,
    context_size: int = 1,
) -> Iterator[Ranks]:
    """Join the processes that `torchrun` has started, and leave them at the end.

    NCCL wants a GPU for each rank; gloo, through the CPU's memory, lets several share one.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size % tensor_size:
        raise ScratchLMError(f"train.tp must divide the number of ranks, {size}; got {tensor_size}")
    if size // tensor_size % context_size:
        raise ScratchLMError(
            f"train.cp must divide the number of ranks, {size}; got {context_size}"
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count and backend != "gloo":
            raise ScratchLMError(
                f"rank {rank} has no GPU of its own: this machine has {count} "
                "(train.backend=gloo lets ranks share one)"
            )
        device = torch.device("cuda", local % count)
        torch.cuda.set_device(device)
    elif backend == "nccl":
        raise ScratchLMError(f"train.backend=nccl is for GPUs; the ranks are on {device_type}")
    limit = timedelta(seconds=timeout)
    is_nccl = device_type == "cuda" and backend != "gloo"
    try:
        store = _store_of_this_start(rank, size, limit)
        backends = "cpu:gloo,cuda:nccl" if is_nccl else "gloo"
        dist.init_process_group(backends, timeout=limit, store=store, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ScratchLMError(f"the {size} ranks did not find each other: {why}") from None
    try:
        grid = (size // tensor_size, tensor_size)
        yield Ranks(
            rank=rank,
            size=size,
            device=device,
            mesh=init_device_mesh(device_type, grid, mesh_dim_names=("data", "tensor")),
            control=dist.new_group(backend="gloo", timeout=limit),
            store=dist.PrefixStore("scratchlm", dist.distributed_c10d._get_default_store()),
            timeout=timeout,
            per_machine=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
            context_size=context_size,
        )
    except BaseException:
        _wait_for_gloo()
        if not is_nccl:  # which would wait for ranks that are gone
            dist.destroy_process_group()
        raise
    _wait_for_gloo()
    dist.destroy_process_group()


def _store_of_this_start(rank: int, size: int, limit: timedelta) -> dist.Store | None:
    """Return the launcher's store, without what ranks of an earlier start have said in it.

    `torchrun` keeps one store over its restarts; on one machine it counts them alike for all ranks.
    None: torch makes a store, which is new.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: dist.Store = dist.TCPStore(*where, size, is_master=False, timeout=limit)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    if store.add(f"joined/{rank}", 1) > 1:
        raise ScratchLMError(
            "torchrun has started the ranks of several machines again beside what the last ones "
            "said: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun … lets them begin anew"
        )
    return store


def _wait_for_gloo(seconds: float = 5.0) -> None:
    """Wait until gloo's threads have let go of what the last collectives were given.

    A tensor that Python knows is let go of under Python's lock, and C++ aborts the process if one
    of its threads asks for that lock while Python ends.
    """
    end = time.monotonic() + seconds
    idle_looks = 0
    while idle_looks < 2 and time.monotonic() < end:
        time.sleep(0.002)  # the lock is theirs
        idle_looks = idle_looks + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    """Look whether all of gloo's threads wait for work; without Linux's /proc, wait and believe."""
    threads = Path("/proc/self/task")
    if not threads.is_dir():
        time.sleep(0.05)
        return True
    for stat in threads.glob("*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(") ")
        except OSError:  # it has ended
            continue
        if name.endswith("(pt_gloo_runloop") and not rest.startswith("S"):
            return False
    return True
