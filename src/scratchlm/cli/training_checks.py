"""Mistakes that can be found before any work is done, and options that could not take effect."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.checkpoint import is_checkpoint
from scratchlm.config import ModelConfig
from scratchlm.data.token_file import token_paths
from scratchlm.errors import ScratchLMError
from scratchlm.interop import is_hf_directory
from scratchlm.training import has_run

if TYPE_CHECKING:
    from scratchlm.cli.training_setup import TrainArgs

SMALLEST_VOCABULARY = 512
TOKENS = tuple(10**power for power in range(2, 11))  # of any text there may be
KEEP_BYTES = 64 << 20  # of encoded text: more than this is not thrown away for an error
OF_A_RUN = {".lock", "data", "metrics.jsonl", "report.html", "loss.png", "tensorboard"}

ModelOf = Callable[[int, int], ModelConfig]  # of so many tokens and such a vocabulary


def check_place(out: Path, resume: bool) -> None:
    """Refuse a place that holds something other than a run to go on with."""
    if has_run(out) and not resume:
        raise ScratchLMError(
            f"{out} holds a run already: --resume goes on with it, another --out begins a new one"
        )
    if has_run(out) or not out.is_dir():
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
    """Take a folder that was made for a run away again if the run is refused."""
    existed = out.exists()
    try:
        yield
    except (ScratchLMError, TypeError, ValueError, OSError):
        if not existed and out.is_dir() and not has_run(out):
            size = sum(path.lstat().st_size for path in out.rglob("*") if path.is_file())
            if size < KEEP_BYTES:
                shutil.rmtree(out, ignore_errors=True)
        raise


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
