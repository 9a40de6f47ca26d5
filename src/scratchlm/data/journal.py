"""The work folder of `prepare`: how a killed run goes on, and how files become finished.

`OUT/.prepare/` holds train.partial and val.partial, to which the ids of the parts are appended in
order, and journal.jsonl, with one line for each part: its key, the counts so far and the CRC-32 of
both files so far. The line is written after the ids are on disk, so the files hold at least what
the journal says; the rest is cut off when a run goes on. A part's key names everything its ids
depend on: where the new plan and the journal begin alike, the work is kept.

When all parts are there, commit.json takes the two sidecars. From then on finishing is a list of
renames that can be repeated: data first, sidecars last. `train.bin` with its `train.json` is
therefore always whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scratchlm.data.encoding import Counts
from scratchlm.data.split import SIDES
from scratchlm.data.token_file import TokenFileInfo
from scratchlm.durable import fsync_directory, write_atomically

FOLDER = ".prepare"
COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """What stands in the partial files once a part is in."""

    key: str
    counts: Counts
    train_crc32: int
    val_crc32: int

    def crc32(self, side: str) -> int:
        """The CRC-32 of one side's ids up to here."""
        return self.train_crc32 if side == "train" else self.val_crc32

    def count(self, side: str) -> int:
        """The number of one side's ids up to here."""
        return self.counts.train if side == "train" else self.counts.val


_START = Entry("", Counts(), 0, 0)


class Journal:
    """Partial token files that grow part by part and can be taken up again."""

    def __init__(self, folder: Path, itemsize: int) -> None:
        self.folder, self.itemsize = folder, itemsize
        self.path = folder / "journal.jsonl"
        self.last = _START

    def partial(self, side: str) -> Path:
        """The unfinished data of one side."""
        return self.folder / f"{side}.partial"

    def resume(self, keys: Sequence[str]) -> int:
        """Keep what fits the plan, drop the rest, and say how many parts are done."""
        for stray in self.folder.glob("part-*"):
            stray.unlink()
        done: list[Entry] = []
        for entry, key in zip(self._entries(), keys, strict=False):
            if entry.key != key:
                break
            done.append(entry)
        if done and not all(self._is_there(side, done[-1]) for side in SIDES):
            done = []
        self.last = done[-1] if done else _START
        for side in SIDES:
            with open(self.partial(side), "ab") as file:
                file.truncate(self.last.count(side) * self.itemsize)
                os.fsync(file.fileno())
        write_atomically(self.path, "".join(map(_line, done)).encode())
        return len(done)

    def _entries(self) -> list[Entry]:
        entries: list[Entry] = []
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            for line in self.path.read_text(encoding="utf-8").splitlines():
                values = json.loads(line)  # the last line may be cut off
                entries.append(Entry(**{**values, "counts": Counts(**values["counts"])}))
        return entries

    def _is_there(self, side: str, entry: Entry) -> bool:
        try:
            crc32 = crc32_of(self.partial(side), entry.count(side) * self.itemsize)
        except (FileNotFoundError, EOFError):
            return False
        return crc32 == entry.crc32(side)

    def append(self, key: str, path: Path, counts: Counts) -> None:
        """Take over the ids of one part; on return they are safe."""
        crc32 = {}
        for side in SIDES:
            ids = Path(f"{path}.{side}")
            crc32[side] = self._append_file(side, ids)
            ids.unlink()
        entry = Entry(key, self.last.counts + counts, crc32["train"], crc32["val"])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())
        self.last = entry

    def _append_file(self, side: str, path: Path) -> int:
        crc32 = self.last.crc32(side)
        if path.stat().st_size == 0:
            return crc32
        with open(path, "rb") as ids, open(self.partial(side), "ab") as out:
            while chunk := ids.read(COPY_BYTES):
                out.write(chunk)
                crc32 = zlib.crc32(chunk, crc32)
            out.flush()
            os.fsync(out.fileno())
        return crc32

    def move_tail(self, keep: int) -> tuple[int, int]:
        """Copy the training ids from `keep` on to the validation side; return both CRC-32s."""
        train, val = self.partial("train"), self.partial("val")
        with open(train, "rb") as source, open(val, "wb") as out:
            source.seek(keep * self.itemsize)
            shutil.copyfileobj(source, out, COPY_BYTES)
            out.flush()
            os.fsync(out.fileno())
        return crc32_of(train, keep * self.itemsize), crc32_of(val, val.stat().st_size)


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def crc32_of(path: Path, size: int) -> int:
    """The CRC-32 of the first `size` bytes of a file, which must have that many."""
    crc32 = 0
    with open(path, "rb") as file:
        while size:
            chunk = file.read(min(COPY_BYTES, size))
            if not chunk:
                raise EOFError(f"{path} is shorter than expected")
            crc32, size = zlib.crc32(chunk, crc32), size - len(chunk)
    return crc32


def record_commit(folder: Path, infos: dict[str, TokenFileInfo]) -> None:
    """Decide what the finished files are; from here on only renames are left."""
    sidecars = {side: json.loads(info.to_json()) for side, info in infos.items()}
    write_atomically(folder / "commit.json", json.dumps(sidecars).encode())


def read_commit(out: Path, folder: Path, plan: str) -> dict[str, TokenFileInfo] | None:
    """Find a decided commit of this plan that can still be carried out."""
    try:
        sidecars = json.loads((folder / "commit.json").read_text(encoding="utf-8"))
        infos = {side: TokenFileInfo.from_dict(values) for side, values in sidecars.items()}
    except (FileNotFoundError, ValueError):
        return None
    if not (folder / "tokenizer").is_dir():
        return None
    for side, info in infos.items():
        partial, data = folder / f"{side}.partial", out / f"{side}.bin"
        there = partial if partial.exists() else data
        if info.plan != plan or not there.exists() or there.stat().st_size < info.num_bytes:
            return None
    return infos


def carry_out_commit(out: Path, folder: Path, infos: dict[str, TokenFileInfo]) -> None:
    """Make the finished files visible; repeating it after a crash does no harm."""
    for side in SIDES:  # an older result stops being whole before its data goes
        (out / f"{side}.json").unlink(missing_ok=True)
        if side not in infos:
            (out / f"{side}.bin").unlink(missing_ok=True)
    fsync_directory(out)
    for side, info in infos.items():
        partial = folder / f"{side}.partial"
        if partial.exists():
            with open(partial, "ab") as file:
                file.truncate(info.num_bytes)
                os.fsync(file.fileno())
            os.replace(partial, out / f"{side}.bin")
    for path in sorted((folder / "tokenizer").iterdir()):
        write_atomically(out / path.name, path.read_bytes(), folder)
    fsync_directory(out)
    for side, info in infos.items():
        write_atomically(out / f"{side}.json", info.to_json().encode(), folder)
    (folder / "commit.json").unlink()  # first: what is left of the folder must not be obeyed
    shutil.rmtree(folder, ignore_errors=True)
