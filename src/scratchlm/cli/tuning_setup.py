"""From what `scratchlm finetune` was asked for to a plan: encode the data, choose the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from scratchlm.accounting import count_parameters
from scratchlm.checkpoint import is_checkpoint, read_manifest
from scratchlm.cli.starting import LR_FACTOR, ROW, StartModel, start_model
from scratchlm.config import ModelConfig
from scratchlm.config.lora import LoRA
from scratchlm.data.conversations import AnyTokenizer, Encoder, Example, default_template
from scratchlm.data.examples import (
    Examples,
    Rows,
    gather_examples,
    save_examples,
    write_examples,
)
from scratchlm.data.permutation import derive_key, permute
from scratchlm.data.records import read_records
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import read_task
from scratchlm.tokenizer import load_tokenizer
from scratchlm.tokenizer.chat_template import CONFIG, ChatTemplate
from scratchlm.training.choosing import Machine
from scratchlm.training.plan import DataFiles, Plan, epochs
from scratchlm.training.settings import TrainConfig
from scratchlm.training.tuning import Tuning, check_tuning
from scratchlm.untrusted import MAX_TOKENIZER_BYTES, read_bytes

EPOCHS, ROWS, VAL_FRACTION = 3, 16, 0.05
_SPLIT = 7  # the purpose a key is derived for

Say = Callable[[str], None]


@dataclass(frozen=True)
class TuneArgs:
    """What the command line asks for; None: as suits."""

    model: Path | None
    data: Path | None
    out: Path
    full: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    preference: str | None = None
    beta: float | None = None
    task: str | None = None
    packed: bool | None = None
    epochs: float | None = None
    val: Path | None = None
    val_fraction: float | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    def tuning(self) -> Tuning:
        """Return what makes the run one of fine-tuning."""
        if self.full and self.lora:
            option = next(iter(self.lora)).replace("_", "-")
            raise ValueError(f"--{option} is for LoRA and has no effect beside --full")
        if self.full and self.quantize is not None:
            raise ValueError("--quantize is for LoRA: with --full the model's weights learn")
        if self.beta is not None and self.preference is None:
            raise ValueError("--beta needs --preference dpo")
        if self.packed and self.preference is not None:
            raise ValueError("--pack has no effect beside --preference: each answer has its row")
        return Tuning(
            lora=None if self.full else LoRA(**self.lora),
            quantize=self.quantize,
            packed=self.packed is not False and self.preference is None,
            preference=self.preference,
            beta=0.1 if self.beta is None else self.beta,
        )


def make_tuning_plan(args: TuneArgs, machine: Machine, say: Say) -> Plan:
    """Make the plan of a new run; the records are encoded on the way."""
    from scratchlm.cli.task_setup import check_task, task_reader

    if args.model is None or args.data is None:
        raise ValueError("what to fine-tune, and on what? give MODEL and DATA")
    if args.val is not None and args.val_fraction is not None:
        raise ValueError("--val names the held-out records: --val-fraction has no effect beside it")
    if args.epochs is not None and "steps" in args.overrides:
        raise ValueError("--epochs and the number of steps say the same: give one of them")
    if args.task is not None:
        check_task(args)
    tuning = args.tuning()
    TrainConfig.check(args.overrides)
    started = start_model(args.model, {})
    longest = TrainConfig(row_length=args.overrides.get("row_length")).row_tokens(started.config)
    tokenizer, template = load_tokenizer(started.source), None
    if args.task is not None:
        head, read = task_reader(args.task, args.data, tokenizer, longest)
        tuning = Tuning(packed=False, head=head)
    else:
        encoder, template = _encoder(started, tokenizer, args.data)
        is_pair = tuning.preference is not None

        def read(path: Path) -> list[list[Example]]:
            return list(encoder.records(path, longest, is_pair))

    train, val = split(args, read)
    examples = gather_examples(train, started.fingerprint)
    settings = _settings(args, tuning, started.config, examples, machine)
    check_tuning(tuning, settings, started.config)
    for path in settings.task_files:
        read_task(path)
    files = _write_data(args.out, started, tokenizer, template, examples, val)
    learnt = sum(sum(example.learns) for example in train)
    what = f" of {len(examples.ids):,} tokens, {learnt:,} of them learnt"
    if tuning.head is not None:
        what = f", labels {', '.join(tuning.head.labels[:8])}" if tuning.head.labels else ""
    say(f"data: {len(train):,} examples{what}; {len(val):,} held out")
    return Plan(started.config, settings, files, start=started.source, tuning=tuning)


def check_same_tuning(args: TuneArgs, plan: Plan) -> None:
    """Refuse options that would make another run of the one that is gone on with."""
    tuning = plan.tuning
    if tuning is None:
        raise ScratchLMError(
            f"{args.out} is no run of fine-tuning; `scratchlm train` goes on with it"
        )
    if args.model is not None:
        asked, began = args.model.absolute(), plan.start
        if began is None or asked not in (began.absolute(), *began.absolute().parents):
            raise ValueError(f"{args.out} was begun from {began}, not from {args.model}")
    held = {} if tuning.lora is None else tuning.lora.to_dict()
    held |= {
        "full": tuning.lora is None,
        "quantize": tuning.quantize,
        "preference": tuning.preference,
        "beta": tuning.beta,
        "task": None if tuning.head is None else tuning.head.kind,
        "pack": tuning.packed,
        "no-pack": not tuning.packed,
        "epochs": args.epochs if _same_epochs(args, plan) else float(f"{epochs(plan):.3g}"),
    }
    asked_for = {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in args.lora.items()},
        "full": args.full or None,
        "quantize": args.quantize,
        "preference": args.preference,
        "beta": args.beta,
        "task": args.task,
        "pack": args.packed or None,
        "no-pack": True if args.packed is False else None,
        "epochs": args.epochs,
    }
    for name, value in asked_for.items():
        if value is not None and held.get(name) != value:
            raise ValueError(
                f"--{name} cannot change in a run that was begun; it is {held.get(name)!r}"
            )


def _same_epochs(args: TuneArgs, plan: Plan) -> bool:
    """Say whether --epochs gives as many steps as the run has."""
    if args.epochs is None:
        return True
    steps = plan.train.steps
    return max(1, round(args.epochs * steps / epochs(plan))) == steps


def _encoder(
    started: StartModel, tokenizer: AnyTokenizer, data: Path
) -> tuple[Encoder, ChatTemplate | None]:
    """Return what encodes records, and the template that the run is to keep."""
    eos_id = _end_of_text(started.source, tokenizer)
    own = ChatTemplate.from_directory(started.source)
    template = own or default_template(tokenizer, eos_id)
    keeps = own is not None or any(_is_chat(record) for _, record in read_records(data))
    return Encoder(tokenizer, template, eos_id), template if keeps else None


def _is_chat(record: Mapping[str, Any]) -> bool:
    return any(isinstance(record.get(name), list) for name in ("messages", "chosen"))


def _end_of_text(source: Path, tokenizer: AnyTokenizer) -> int:
    """Return the token that ends a text of the model's."""
    from scratchlm.inference.prompts import default_eos_ids
    from scratchlm.interop import read_hf

    if is_checkpoint(source):
        ids = tuple(read_manifest(source)["metadata"].get("eos_token_ids") or ())
    else:
        ids = read_hf(source).eos_token_ids
    ids = ids or default_eos_ids(tokenizer)
    special = set(tokenizer.special_tokens.values())
    found = next((token for token in ids if token in special), None)
    if found is None:
        raise ScratchLMError(f"{source}: the model has no token that ends a text")
    return found


def split(
    args: TuneArgs, read: Callable[[Path], list[list[Example]]]
) -> tuple[list[Example], list[Example]]:
    """Read the examples of each record; take a part of the records away from training."""
    assert args.data is not None
    train, val = read(args.data), list[list[Example]]()
    if args.val is not None:
        val = read(args.val)
        if not val:
            raise ScratchLMError(f"{args.val}: there is nothing to validate on")
    else:
        train, val = _hold_out(train, args.val_fraction)
    if not train:
        raise ScratchLMError(f"{args.data}: there is nothing to learn from")
    return list(chain.from_iterable(train)), list(chain.from_iterable(val))


def _hold_out(
    records: list[list[Example]], fraction: float | None
) -> tuple[list[list[Example]], list[list[Example]]]:
    """Part the records: of one that gives several examples, none is learnt and held out."""
    share = VAL_FRACTION if fraction is None else fraction
    if not 0 <= share < 1:
        raise ValueError(f"--val-fraction must lie in [0, 1); got {share}")
    count = len(records)
    held = math.ceil(share * count) if fraction else int(share * count)
    if not held:
        return records, []
    import numpy as np

    chosen = set(permute(np.arange(held), count, derive_key(_SPLIT)).tolist())
    train = [one for index, one in enumerate(records) if index not in chosen]
    return train, [one for index, one in enumerate(records) if index in chosen]


def _write_data(
    out: Path,
    started: StartModel,
    tokenizer: AnyTokenizer,
    template: ChatTemplate | None,
    train: Examples,
    val: list[Example],
) -> DataFiles:
    """Write the encoded examples, the tokenizer and its template into the run."""
    folder = out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "tokenizer.json"
    own = started.source / "tokenizer.json"
    if own.is_file():
        write_atomically(copy, read_bytes(own, MAX_TOKENIZER_BYTES))
    else:
        tokenizer.save(folder)
    if template is not None:
        write_atomically(folder / CONFIG, template.to_bytes())
    save_examples(folder / "train.examples", train)
    held_out = None
    if val:
        held_out = folder / "val.examples"
        write_examples(held_out, val, started.fingerprint)
    return DataFiles(folder / "train.examples", held_out, copy)


def _settings(
    args: TuneArgs, tuning: Tuning, model: ModelConfig, examples: Examples, machine: Machine
) -> TrainConfig:
    """Choose rows, steps and learning rate; what was asked for comes first.

    The rate of random weights for an adapter, a tenth of it where all weights learn.
    """
    params = count_parameters(model).unique
    longest = -(-int(examples.lengths.max()) // 64) * 64
    row_length = max(longest, ROW) if tuning.packed else longest
    row_length = int(args.overrides.get("row_length") or min(row_length, model.context_length))
    rows = len(Rows(examples, row_length, packed=tuning.packed).rows)
    batch_size = int(
        args.overrides.get("batch_size") or _even(min(ROWS, max(1, rows // 8)), tuning)
    )
    rate = min(4e-3, max(2e-4, 3e-3 * (params / 1e6) ** -0.25))
    rate *= LR_FACTOR if tuning.lora is None else 1.0
    rate *= 0.1 if tuning.preference else 1.0
    epochs = EPOCHS if args.epochs is None else args.epochs
    if not 0 < epochs < 1e6:
        raise ValueError(f"--epochs must be above 0 and below a million; got {epochs}")
    steps = int(args.overrides.get("steps") or max(1, round(epochs * rows / batch_size)))
    chosen: dict[str, Any] = {
        "steps": steps,
        "eval_every": max(1, steps // 10),
        "batch_size": batch_size,
        "row_length": row_length,
        "lr": float(f"{rate:.2g}"),
        "weight_decay": 0.0 if tuning.lora is not None else 0.1,
    }
    if tuning.preference is not None:
        chosen["cuda_graph"] = False
    if tuning.head is not None:
        chosen |= {"cuda_graph": False, "compile": "off"}
    return TrainConfig.from_dict({**chosen, **args.overrides})


def _even(count: int, tuning: Tuning) -> int:
    return count + count % 2 if tuning.preference is not None else count
