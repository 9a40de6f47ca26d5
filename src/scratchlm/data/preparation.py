"""Text → token files, in one call: find, check, cut, encode in parallel, split, finish.

The result depends on the sources, the tokenizer and the options alone: not on the number of
workers, and not on how often the run was killed and started again (see `journal.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scratchlm.data import journal as journals
from scratchlm.data.encoding import EncodeOptions, Tokenizer
from scratchlm.data.journal import FOLDER, Journal
from scratchlm.data.plan import Plan, Progress, check_all, make_plan, spooled, stamps
from scratchlm.data.sources import find_sources
from scratchlm.data.split import SPLITS, tail_cut
from scratchlm.data.token_file import (
    SourceRecord,
    TokenFile,
    TokenFileInfo,
    dtype_for,
    read_sidecar,
)
from scratchlm.data.workers import WorkerDiedError, encode_parts, usable_cores
from scratchlm.errors import ScratchLMError

END_OF_TEXT = "<|endoftext|>"
KEEP_BYTES = 64 << 20  # unfinished work larger than this survives an error in the input


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`."""

    out: Path
    train: TokenFileInfo
    val: TokenFileInfo | None
    empty_documents: int
    parts: int
    resumed_parts: int
    notes: tuple[str, ...] = ()


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    val_fraction: float = 0.1,
    split: str = "auto",
    separator: str | None = None,
    end_of_text: str | None = None,
    field: str = "text",
    format: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Write train.bin, val.bin, their sidecars and the tokenizer into `out`.

    sources: text, .jsonl and .parquet files (also .gz), directories, globs, or `-` for stdin.
    separator: where text files are split into documents; without it a file is one document.
    end_of_text: the special token that ends each document; `<|endoftext|>` if there is one.
    split: "documents", "tail", or "auto": tail where documents are too few (`split.py`).

    After a kill, the same call resumes; when finished, it returns at once.
    """
    _check_options(val_fraction, split, separator, workers)
    found = find_sources(sources, format)
    loaded = _load(tokenizer)
    eot = _end_of_text_id(loaded, end_of_text)
    report = progress or (lambda _: None)
    with _work_folder(Path(out)) as folder:
        found = [spooled(source, folder) for source in found]
        before = dict(zip((source.path for source in found), stamps(found), strict=True))
        marker = None if separator else end_of_text or END_OF_TEXT
        checked = check_all(found, marker, report)
        options = EncodeOptions(field, separator, eot, None)
        plan = make_plan(found, checked, loaded, options, split, val_fraction)
        prepared = _finish_commit(Path(out), folder, plan) or _find_finished(
            Path(out), plan, overwrite
        )
        if prepared is None:
            prepared = _execute(Path(out), folder, plan, before, loaded, workers, report)
        return replace(prepared, notes=tuple(_notes(plan, prepared, marker)))


def _check_options(
    val_fraction: float, split: str, separator: str | None, workers: int | None
) -> None:
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must be in [0, 1); got {val_fraction}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    if separator == "":
        raise ValueError("separator must not be empty; leave it out for one document per file")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be >= 1; got {workers}")


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint that a tokenizer's token files carry."""
    return _load(path).fingerprint()


def _load(tokenizer: Tokenizer | str | os.PathLike[str]) -> Tokenizer:
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    from scratchlm.tokenizer import load_tokenizer

    return load_tokenizer(Path(tokenizer))


def _end_of_text_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    special = tokenizer.special_tokens
    if token is None:
        return special.get(END_OF_TEXT)
    if token not in special:
        has = ", ".join(map(repr, special)) or "none"
        raise ValueError(f"end_of_text {token!r} is not a special token of the tokenizer: {has}")
    return special[token]


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Hold OUT/.prepare for this process alone; an error in the input leaves nothing behind."""
    if out.exists() and not out.is_dir():
        raise ScratchLMError(f"{out}: exists and is not a directory")
    existed = out.exists()
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ScratchLMError(f"{out}: another prepare is writing there") from None
        try:
            yield folder
        except WorkerDiedError:
            raise
        except OSError as error:  # a full disk names no file; what is done is kept
            if error.filename is None:
                raise OSError(error.errno, error.strerror or str(error), str(out)) from None
            raise
        except (ScratchLMError, ValueError, TypeError):
            partials = [path.stat().st_size for path in folder.glob("*.partial")]
            if sum(partials) < KEEP_BYTES:
                shutil.rmtree(folder, ignore_errors=True)
                if not existed:
                    with contextlib.suppress(OSError):
                        out.rmdir()
            raise
        else:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _finish_commit(out: Path, folder: Path, plan: Plan) -> Prepared | None:
    """Complete the commit of an earlier run that died between its final renames."""
    infos = journals.read_commit(out, folder, plan.name)
    if infos is None:
        return None
    journals.carry_out_commit(out, folder, infos)
    return Prepared(out, infos["train"], infos.get("val"), 0, len(plan.parts), len(plan.parts))


def _find_finished(out: Path, plan: Plan, overwrite: bool) -> Prepared | None:
    """Find the finished result of this plan; refuse to overwrite that of another."""
    if not any((out / f"{side}.json").exists() for side in ("train", "val")):
        return None
    try:
        infos = {}
        for side in ("train", "val") if plan.val_fraction else ("train",):
            infos[side] = read_sidecar(out / side)
            TokenFile(out / side).close()
    except ScratchLMError:
        infos = {}
    if infos and all(info.plan == plan.name for info in infos.values()):
        count = len(plan.parts)
        return Prepared(out, infos["train"], infos.get("val"), 0, count, count)
    if not overwrite:
        raise ScratchLMError(
            f"{out} holds token files made from other sources or options; choose another "
            "folder, or have them replaced by `scratchlm prepare --overwrite`"
        )
    return None


def _execute(
    out: Path,
    folder: Path,
    plan: Plan,
    before: dict[str, tuple[int, int]],
    tokenizer: Tokenizer,
    workers: int | None,
    report: Callable[[Progress], None],
) -> Prepared:
    total = len(plan.parts)
    (folder / "commit.json").unlink(missing_ok=True)
    journal = Journal(folder, dtype_for(tokenizer.vocab_size).itemsize)
    resumed = journal.resume(plan.keys)
    saved = folder / "tokenizer"
    shutil.rmtree(saved, ignore_errors=True)
    saved.mkdir()
    tokenizer.save(saved)
    _encode(journal, plan, resumed, tokenizer, saved, workers, report)
    for source, now in zip(plan.sources, stamps(plan.sources), strict=True):
        if now != before[source.path]:
            raise ScratchLMError(f"{source.name}: the file changed while it was being read")
    infos = _file_infos(journal, plan, tokenizer)
    journals.record_commit(folder, infos)
    journals.carry_out_commit(out, folder, infos)
    empty = journal.last.counts.empty_documents
    return Prepared(out, infos["train"], infos.get("val"), empty, total, resumed)


def _encode(
    journal: Journal,
    plan: Plan,
    resumed: int,
    tokenizer: Tokenizer,
    saved: Path,
    workers: int | None,
    report: Callable[[Progress], None],
) -> None:
    workers = workers or usable_cores()
    total = sum(part.weight for part in plan.parts)
    done = sum(part.weight for part in plan.parts[:resumed])
    results = encode_parts(
        plan.parts[resumed:], tokenizer, saved, plan.options, journal.folder, workers
    )
    with contextlib.closing(results):  # type: ignore[type-var]
        for key, (part, path, counts) in zip(plan.keys[resumed:], results, strict=True):
            journal.append(key, path, counts)
            done += part.weight
            tokens = journal.last.counts.train + journal.last.counts.val
            report(Progress("encode", done, total, tokens))


def _file_infos(journal: Journal, plan: Plan, tokenizer: Tokenizer) -> dict[str, TokenFileInfo]:
    """Describe the finished files, after cutting off the tail if that is the split."""
    last = journal.last
    counts = {"train": last.counts.train, "val": last.counts.val}
    crc32 = {"train": last.train_crc32, "val": last.val_crc32}
    documents: dict[str, int | None] = {
        "train": last.counts.train_documents,
        "val": last.counts.val_documents,
    }
    if not sum(counts.values()):
        raise ScratchLMError("the sources hold no text: every document is empty")
    split = plan.split
    if split == "documents" and plan.may_cut and not counts["val"]:
        split = "tail"
    if split == "tail":
        all_ids = counts["train"]
        closing = 0 if plan.options.end_of_text is None else 1
        keep = tail_cut(all_ids - closing, plan.val_fraction)
        counts = {"train": keep, "val": all_ids - keep}
        documents = {"train": None, "val": None}
    sides = ("train", "val") if plan.val_fraction else ("train",)
    for side in sides:
        if not counts[side]:
            raise ScratchLMError(
                f"nothing falls on the {side} side of the split (documents: "
                f"{last.counts.train_documents + last.counts.val_documents}, val_fraction="
                f"{plan.val_fraction}): use split 'tail' or another val_fraction"
            )
    if split == "tail":
        crc32["train"], crc32["val"] = journal.move_tail(counts["train"])
    records = tuple(
        SourceRecord(source.name, source.size, known.sha256)
        for source, known in zip(plan.sources, plan.checked, strict=True)
    )
    return {
        side: TokenFileInfo(
            count=counts[side],
            dtype=dtype_for(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.fingerprint(),
            crc32=crc32[side],
            end_of_text=plan.options.end_of_text,
            documents=documents[side],
            split=split if split == "none" else f"{split} {plan.val_fraction}",
            plan=plan.name,
            sources=records,
        )
        for side in sides
    }


def _notes(plan: Plan, prepared: Prepared, marker: str | None) -> Iterator[str]:
    for source, known in zip(plan.sources, plan.checked, strict=True):
        if known.holds_marker:
            yield (
                f"{source.name} holds {marker!r}, which stays plain text; "
                "give it as separator to split documents there"
            )
    one_text = len(plan.sources) == 1 and plan.sources[0].kind == "text" and marker
    cut = (prepared.train.split or "").startswith("tail")
    if plan.may_cut and cut and not one_text:
        yield "too few documents to hold out whole ones: the end of the text is held out"
    if plan.options.end_of_text is None and (prepared.train.documents or 0) > 1:
        yield "the tokenizer has no end-of-text token: documents run into each other"
    if prepared.empty_documents:
        yield f"{prepared.empty_documents:,} empty documents were left out"
