"""Mistakes that can be found before any work is done, and options that could not take effect."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.checkpoint import is_checkpoint
from scratchlm.config import ModelConfig
from scratchlm.data.sources import Source, find_sources
from scratchlm.data.token_file import read_sidecar, token_paths
from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import read_task
from scratchlm.interop import is_hf_directory
from scratchlm.training import DataFiles, has_run

if TYPE_CHECKING:
    from scratchlm.cli.training_setup import TrainArgs
    from scratchlm.parallel.ranks import Ranks
    from scratchlm.training import Plan

SMALLEST_VOCABULARY = 512
TOKENS = tuple(10**power for power in range(2, 11))  # of any text there may be
KEEP_BYTES = 64 << 20  # of encoded text: more than this is not thrown away for an error
OF_A_RUN = {".lock", "data", "metrics.jsonl", "report.html", "loss.png", "tensorboard"}

Say = Callable[[str], None]
ModelOf = Callable[[int, int], ModelConfig]  # of so many tokens and such a vocabulary


def check_folder(out: Path) -> None:
    """Refuse a file in the place of a run."""
    if out.exists() and not out.is_dir():
        raise ScratchLMError(f"{out} is a file; a run needs a folder")


def check_place(out: Path, resume: bool) -> None:
    """Refuse a place that holds something other than a run to go on with."""
    if has_run(out) and not resume:
        raise ScratchLMError(
            f"{out} holds a run already: --resume goes on with it, another --out begins a new one"
        )
    check_folder(out)
    if has_run(out) or not out.exists():
        return
    if is_checkpoint(out) or is_hf_directory(out):
        raise ScratchLMError(
            f"{out} is a model, not a run: --from {out} starts from it, with another --out"
        )
    others = sorted(path.name for path in out.iterdir() if path.name not in OF_A_RUN)
    if resume and others:
        raise ScratchLMError(
            f"{out} holds no run to go on with, but {others[0]}; without --resume a run begins"
        )


@contextlib.contextmanager
def leaving_nothing(out: Path) -> Iterator[None]:
    """Make the folder of a run; take away what was made if the run is refused.

    Only who made the folder removes it: another process may be at work in one that was there.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        made = []
    try:
        yield
    except BaseException as error:
        is_refusal = isinstance(error, (ScratchLMError, TypeError, ValueError, OSError))
        if made and is_refusal and not has_run(out) and _size(out) < KEEP_BYTES:
            shutil.rmtree(out, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # what is not empty stays
                folder.rmdir()
        raise


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def check_model(
    model_of: ModelOf, vocab_size: int | None, check: Callable[[ModelConfig, int], object]
) -> None:
    """Refuse a model, or settings for it, that fit no text, before the text is read.

    What is chosen by the text's size is tried for all sizes: one must do.
    """
    first: Exception | None = None
    for tokens in TOKENS:
        try:
            check(model_of(tokens, vocab_size or SMALLEST_VOCABULARY), tokens)
            return
        except (TypeError, ValueError) as error:
            first = first or error
    assert first is not None
    raise first


def check_data(args: TrainArgs, table: dict[str, Any], is_text: bool) -> None:
    """Refuse options for the data that could not take effect."""
    DataFiles.check_keys(table)
    if args.data and table:
        raise ValueError(f"give the data as DATA or by data.{next(iter(table))}, not by both")
    if args.val is not None and args.val_fraction is not None:
        raise ValueError("--val names the held-out tokens: --val-fraction has no effect beside it")
    if args.val is not None and not token_paths(args.val)[0].is_file():
        raise ScratchLMError(
            f"--val must be a token file, as `scratchlm prepare` makes them; {args.val} is not"
        )
    if args.val_fraction is not None and not 0 <= args.val_fraction < 1:
        raise ValueError(f"--val-fraction must be in [0, 1); got {args.val_fraction}")
    if args.vocab_size is not None and args.vocab_size <= 256:
        raise ValueError(
            "--vocab-size must be at least 257, for 256 bytes and the end of a text; got "
            f"{args.vocab_size}"
        )
    if not is_text:
        for_text = {
            "--vocab-size": args.vocab_size,
            "--val-fraction": args.val_fraction,
            "--separator": args.separator,
            "--field": args.text_field,
            "--tokenizer bpe": args.tokenizer == "bpe" or None,
            "--tokenizer char": args.tokenizer == "char" or None,
        }
        for name, value in for_text.items():
            if value is not None:
                raise ValueError(f"{name} is for text; the data is encoded already")
    elif args.vocab_size is not None and args.tokenizer not in (None, "bpe"):
        raise ValueError(
            f"--vocab-size is for a tokenizer that is learnt; --tokenizer {args.tokenizer} has its "
            "own vocabulary"
        )
    if is_text and (args.text_field is not None or args.separator is not None):
        check_source_options(find_sources(args.data), args.text_field, args.separator)


def check_source_options(sources: list[Source], field: str | None, separator: str | None) -> None:
    """Refuse options for another kind of files than those that are given."""
    kinds = {source.kind for source in sources}
    if field is not None and kinds == {"text"}:
        raise ValueError("--field is for JSON Lines and Parquet; the data is plain text")
    if separator is not None and "text" not in kinds:
        raise ValueError("--separator is for text files; JSON Lines and Parquet hold documents")


def check_val(path: Path | None, fingerprint: str) -> None:
    """Refuse held-out tokens of another tokenizer: their ids mean something else."""
    if path is not None and (found := read_sidecar(path).tokenizer) != fingerprint:
        raise ScratchLMError(
            f"--val {path} was made with another tokenizer than the run's: fingerprint "
            f"{found[:16]}, not {fingerprint[:16]}"
        )


def check_same_data(args: TrainArgs, table: dict[str, Any], plan: Plan, say: Say) -> None:
    """Refuse data options that contradict those a run was begun with; name those not looked at."""
    if args.data:
        say(f"going on with the run's own data, {plan.data.train.parent}")
    DataFiles.check_keys(table)
    for name, path in table.items():
        if Path(path).absolute() != getattr(plan.data, name, None):
            raise ValueError(f"data.{name} cannot change in a run that was begun")
    if args.val is not None and token_paths(args.val)[0].absolute() != plan.data.val:
        raise ValueError(
            f"--val cannot change in a run that was begun; it is {plan.data.val or 'not set'}"
        )
    if args.tokenizer is not None:
        _check_same_tokenizer(args.tokenizer, plan)
    if args.vocab_size is not None:
        held = read_sidecar(plan.data.train).vocab_size
        if args.vocab_size < held:  # a short text fills no large vocabulary
            raise ValueError(f"--vocab-size cannot change in a run that was begun; it is {held:,}")
    options = {
        "--val-fraction": args.val_fraction,
        "--separator": args.separator,
        "--field": args.text_field,
    }
    for name, value in options.items():
        if value is not None:
            say(f"note: {name} has no effect now: the run's text is encoded already")


def _check_same_tokenizer(name: str, plan: Plan) -> None:
    from scratchlm.tokenizer import CharTokenizer, load_tokenizer

    if name in ("bpe", "char"):
        if plan.data.tokenizer is not None:
            is_char = isinstance(load_tokenizer(plan.data.tokenizer), CharTokenizer)
            if is_char != (name == "char"):
                held = "char" if is_char else "bpe"
                raise ValueError(f"--tokenizer cannot change in a run that was begun; it is {held}")
        return
    asked, held = load_tokenizer(name).fingerprint(), read_sidecar(plan.data.train).tokenizer
    if asked != held:
        raise ScratchLMError(
            f"the run was begun with another tokenizer than {name}: fingerprint {held[:16]}, not "
            f"{asked[:16]}"
        )


def check_tasks(tasks: Any) -> None:
    """Refuse tasks whose files are not there, or hold something else."""
    for name in tasks.split(",") if isinstance(tasks, str) and tasks else ():
        if not Path(name).is_file():
            raise ScratchLMError(f"train.tasks: {name}: no such file")
        read_task(name)


def name_unused(typed: dict[str, Any], plan: Plan, ranks: Ranks | None, ops: str, say: Say) -> None:
    """Name the settings that were typed and have no effect beside the others."""
    settings, has_val = plan.train, plan.data.val is not None
    evaluates, is_tuned = settings.eval_every != 0, plan.tuning is not None
    never = "with train.eval_every=0" if has_val else "without held-out data"
    rows = settings.micro_batch_size or settings.batch_size
    uses = {
        "momentum": (settings.optimizer == "muon", "without train.optimizer=muon"),
        "decay_steps": (settings.schedule == "wsd", "without train.schedule=wsd"),
        "min_lr": (settings.schedule != "constant", "without a schedule that falls"),
        "backend": (ranks is not None, "without several ranks"),
        "rank_timeout": (ranks is not None, "without several ranks"),
        "eval_batches": (has_val and evaluates, never),
        "patience": (has_val and evaluates, never),
        "tasks": (evaluates, "with train.eval_every=0"),
        "rows": (not is_tuned, "in fine-tuning, which has rows of examples"),
        "document_mask": (not is_tuned, "in fine-tuning: examples never see each other"),
        "shares": (settings.shares <= rows, f"beyond the {rows} rows computed at a time"),
        "accelerate": (not settings.accelerate or ops == "fast", f"with --ops {ops}"),
    }
    for name, (has_effect, why) in uses.items():
        if typed.get(name) is not None and not has_effect:
            say(f"warning: train.{name} has no effect {why}")


def check_start(args: TrainArgs, model_table: dict[str, Any]) -> None:
    """Refuse what would make another model of the one a run starts from."""
    options = ("preset", "params", "ablation", "tokenizer", "vocab_size")
    for name in options:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} has no effect beside --from, which brings its own")
    for name in model_table:
        if name != "context_length":
            raise ValueError(
                f"model.{name} cannot change beside --from; only model.context_length can"
            )
