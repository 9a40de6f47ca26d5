"""From what a person typed to a plan: find the data, make what is missing, choose the rest."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.cli.starting import fine_tuning_settings, start_model
from scratchlm.cli.training_checks import (
    Say,
    check_data,
    check_model,
    check_same_data,
    check_start,
    check_tasks,
    check_val,
)
from scratchlm.config import ModelConfig, from_dict, load_config, preset, to_dict
from scratchlm.data.sources import Source, find_sources
from scratchlm.data.token_file import read_sidecar, token_paths
from scratchlm.errors import ScratchLMError
from scratchlm.training.ablations import ablate, is_ablated
from scratchlm.training.choosing import (
    Machine,
    choose_model,
    choose_settings,
    choose_vocab_size,
    fit_in_memory,
)
from scratchlm.training.plan import DataFiles, Plan, read_plan
from scratchlm.training.settings import CHANGEABLE, TrainConfig, merge, parse_count
from scratchlm.untrusted import read_toml

if TYPE_CHECKING:
    from scratchlm.tokenizer.files import AnyTokenizer

END_OF_TEXT = "<|endoftext|>"
VAL_FRACTION, TEXT_FIELD = 0.1, "text"
SPOOL_BYTES = 256 << 20  # of text taken out of JSON Lines or Parquet to train a tokenizer on


@dataclass(frozen=True)
class TrainArgs:
    """What the command line asks for."""

    data: list[str]
    out: Path
    preset: str | None = None
    params: str | None = None
    config: Path | None = None
    ablation: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    val: Path | None = None
    val_fraction: float | None = None
    separator: str | None = None
    text_field: str | None = None
    start: Path | None = None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)


def make_plan(args: TrainArgs, machine: Machine, say: Say) -> Plan:
    """Make the plan of a new run; raw text is tokenised on the way."""
    tables = config_tables(args)
    table = tables.get("model", {})

    def model_of(tokens: int, vocab_size: int) -> ModelConfig:
        return _model(args, table, tokens, vocab_size, machine)

    def settings_of(model: ModelConfig, tokens: int) -> TrainConfig:
        chosen = choose_settings(model, tokens, machine).to_dict()
        settings = TrainConfig.from_dict({**chosen, **tables.get("train", {})})
        settings.row_tokens(model)
        return settings

    # What costs nothing to find comes before hours of reading.
    TrainConfig.check(tables.get("train", {}))
    check_tasks(tables.get("train", {}).get("tasks"))
    if args.start is not None:
        check_start(args, table)
        started = start_model(args.start, table)
        args = replace(args, tokenizer=str(started.source))
    else:
        check_model(model_of, args.vocab_size, settings_of)
    check_data(args, tables.get("data", {}), is_text(args))
    files = find_data(args, tables.get("data", {}), machine, say)
    info = read_sidecar(files.train)
    if args.start is None:
        model = model_of(info.count, info.vocab_size)
        settings = settings_of(model, info.count)
    else:
        model, files = started.config, replace(files, tokenizer=started.tokenizer_file(files))
        started.check_tokens(info)
        asked = tables.get("train", {})
        row = asked.get("row_length")  # checked above, as the others were
        chosen = fine_tuning_settings(model, info.count, machine, row).to_dict()
        settings = TrainConfig.from_dict({**chosen, **asked})
    if "batch_size" in tables.get("train", {}) and "micro_batch_size" not in tables["train"]:
        whole = TrainConfig.from_dict({**settings.to_dict(), "micro_batch_size": None})
        settings = fit_in_memory(model, whole, machine)
    return Plan(model, settings, files, start=args.start)


def continue_plan(args: TrainArgs, machine: Machine, say: Say) -> Plan:
    """Take up the plan of a run; what is asked for anew must agree with it, or not touch its past.

    So the command that began a run goes on with it when `--resume` is added.
    """
    plan, tables = read_plan(args.out), config_tables(args)
    if args.start is not None and args.start.absolute() != plan.start:
        began = f"from {plan.start}" if plan.start else "with random weights"
        raise ValueError(f"{args.out} was begun {began}, not from {args.start}")
    check_same_data(args, tables.get("data", {}), plan, say)
    table = tables.get("model", {})
    if args.preset or args.params or args.ablation or table:
        if args.preset or args.params or "num_layers" in table:
            info = read_sidecar(plan.data.train)
            asked = _model(args, table, info.count, info.vocab_size, machine)
        else:
            asked = change_model(plan.model, table)
            if args.ablation and not is_ablated(plan.model, args.ablation):
                asked = ablate(asked, args.ablation)
        if asked != plan.model:
            raise ValueError(f"the model of {args.out} was begun otherwise; it cannot change now")
    changes = tables.get("train", {})
    settings = TrainConfig.from_dict({**plan.train.to_dict(), **changes})
    if settings.cuda_graph and not settings.can_record("cuda" if machine.is_gpu else "cpu"):
        # chosen for another device, or for ranks that do not talk inside a step
        say("note: train.cuda_graph and train.compile are off from here on")
        off = {"cuda_graph": False, "compile": "off"}
        changes = {**{name: off[name] for name in off if name not in changes}, **changes}
        settings = replace(settings, **{name: changes[name] for name in off})
    for name in changes.keys() - CHANGEABLE:
        if getattr(settings, name) != getattr(plan.train, name):
            raise ValueError(
                f"train.{name} cannot change in a run that was begun "
                f"(only {', '.join(sorted(CHANGEABLE))} may); it is {getattr(plan.train, name)!r}"
            )
    lasting = {name: getattr(settings, name) for name in changes.keys() & CHANGEABLE}
    return replace(
        plan, train=settings, changed=frozenset({**dict(plan.changed), **lasting}.items())
    )


def config_tables(args: TrainArgs) -> dict[str, Any]:
    """Read --config (sections, or a model alone) and lay the overrides over it."""
    tables: dict[str, Any] = {}
    if args.config is not None:
        sections = read_toml(args.config) if args.config.suffix == ".toml" else {}
        if sections.keys() & {"model", "train", "data"}:
            sections.pop("changed", None)  # the past of another run
            unknown = sections.keys() - {"model", "train", "data"}
            if unknown:
                raise ValueError(f"{args.config}: unknown config key: {min(unknown)}")
            tables = sections
        else:
            tables = {"model": to_dict(load_config(args.config))}
    tables = merge(tables, args.overrides)
    tasks = tables.get("train", {}).get("tasks")
    if tasks:  # a session that goes on may begin elsewhere
        tables["train"] = {**tables["train"], "tasks": absolute_tasks(tasks)}
    return tables


def absolute_tasks(tasks: Any) -> Any:
    """Return train.tasks with whole paths."""
    names = tasks.split(",") if isinstance(tasks, str) else tasks
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return tasks  # refused where settings are checked
    return ",".join(os.path.abspath(name.strip()) for name in names)


# The model


def _model(
    args: TrainArgs, table: dict[str, Any], tokens: int, vocab_size: int, machine: Machine
) -> ModelConfig:
    named = [name for name in ("preset", "params") if getattr(args, name)]
    if args.config is not None and "num_layers" in table:
        named.append("config")
    if len(named) > 1:
        raise ValueError(f"choose the model by --{named[0]} or by --{named[1]}, not by both")
    if named == ["config"]:
        model = from_dict({"vocab_size": vocab_size, **table})
    else:
        if args.preset:
            model = preset(args.preset).replace(vocab_size=vocab_size)
        else:
            model = choose_model(tokens, vocab_size, machine, _count(args.params))
        model = change_model(model, table)
    return ablate(model, args.ablation) if args.ablation else model


def _count(params: str | None) -> int | None:
    try:
        return None if params is None else parse_count(params)
    except ValueError as error:
        raise ValueError(f"--params: {error}") from None


def change_model(model: ModelConfig, table: dict[str, Any]) -> ModelConfig:
    """Change fields of a model; sizes that follow from others follow, parts are merged."""
    whole, changes = to_dict(model), {}
    for name, value in table.items():
        if isinstance(whole.get(name), dict):
            part = value if isinstance(value, dict) else {"type": value}  # a part by its kind
            value = getattr(from_dict(merge(whole, {name: part})), name)
        changes[name] = value
    return model.replace(**changes) if changes else model


# The data


def find_data(args: TrainArgs, table: dict[str, Any], machine: Machine, say: Say) -> DataFiles:
    """Find the token files: named in the config, prepared, a single file, or made from text."""
    if not args.data:
        if "train" not in table:
            raise ValueError("what to train on? give text files, a prepared folder or a token file")
        return DataFiles.from_dict(table, Path.cwd())
    first = Path(args.data[0])
    if is_text(args):
        return _from_text(args, machine, say)
    if is_prepared(first):
        val = first / "val.bin"
        files = DataFiles(first / "train.bin", val if val.exists() else None)
    else:
        files = DataFiles(token_paths(first)[0])
    beside = Path(args.tokenizer) if args.tokenizer else files.train.parent
    beside = beside / "tokenizer.json" if beside.is_dir() else beside
    tokenizer = beside if args.tokenizer or beside.exists() else None
    return DataFiles(files.train, args.val or files.val, tokenizer)


def is_text(args: TrainArgs) -> bool:
    """Say whether the data is text, to be encoded first."""
    if not args.data:
        return False
    first = Path(args.data[0])
    return len(args.data) > 1 or not (is_prepared(first) or is_token_file(first))


def is_prepared(path: Path) -> bool:
    """Say whether a path is a folder that `scratchlm prepare` has made."""
    return path.is_dir() and (path / "train.bin").is_file()


def is_token_file(path: Path) -> bool:
    """Say whether a path names a token file."""
    data, sidecar = token_paths(path)
    return path.suffix == ".bin" or (data.is_file() and sidecar.is_file())


def _from_text(args: TrainArgs, machine: Machine, say: Say) -> DataFiles:
    from scratchlm.data import prepare

    if "-" in args.data:
        raise ValueError("standard input can be read only once; run `scratchlm prepare -` first")
    sources = find_sources(args.data)
    size = sum(source.size for source in sources)
    separator = args.separator or _found_separator(sources, say)
    tokenizer = _tokenizer(args, sources, size, machine, say)
    check_val(args.val, tokenizer.fingerprint())
    folder = args.out / "data"
    fraction = VAL_FRACTION if args.val_fraction is None else args.val_fraction
    say(f"encoding {size / 1e6:,.1f} MB with {tokenizer.vocab_size:,} tokens")
    prepared = prepare(
        args.data,
        tokenizer,
        folder,
        val_fraction=0.0 if args.val else fraction,
        separator=separator,
        field=args.text_field or TEXT_FIELD,
    )
    for note in prepared.notes:
        say(f"note: {note}")
    val = args.val or (folder / "val.bin" if prepared.val else None)
    held_out = f", {prepared.val.count:,} held out" if prepared.val else ""
    say(f"{prepared.train.count:,} tokens to train on{held_out}")
    return DataFiles(folder / "train.bin", val, folder / "tokenizer.json")


def _found_separator(sources: list[Source], say: Say) -> str | None:
    """Look for end-of-text marks where the text begins: corpora that have them mean them."""
    for source in sources:
        if source.kind == "text" and not source.gzipped:
            with open(source.path, "rb") as file:
                if END_OF_TEXT.encode() in file.read(1 << 20):
                    say(f"{source.name} has {END_OF_TEXT} marks: documents end there")
                    return END_OF_TEXT
    return None


def _tokenizer(
    args: TrainArgs, sources: list[Source], size: int, machine: Machine, say: Say
) -> AnyTokenizer:
    """Load the tokenizer that was named, or learn one from the text."""
    from scratchlm.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, train_bpe
    from scratchlm.tokenizer.training import read_text

    if args.tokenizer not in (None, "char", "bpe"):
        assert args.tokenizer is not None
        if not Path(args.tokenizer).exists():
            raise ScratchLMError(
                f"--tokenizer must be char, bpe, or a tokenizer's file or folder; "
                f"{args.tokenizer} does not exist"
            )
        return load_tokenizer(args.tokenizer)
    with _text_files(args, sources) as files:
        if args.tokenizer == "char":
            pieces = (piece for file in files for piece in read_text(file))
            return CharTokenizer.of_text(pieces, [END_OF_TEXT])
        vocab_size = args.vocab_size or choose_vocab_size(size, machine)
        say(f"learning a vocabulary of {vocab_size:,} tokens")
        vocab, merges = train_bpe(files, vocab_size, [END_OF_TEXT])
        return Tokenizer(vocab, merges, [END_OF_TEXT])


@contextlib.contextmanager
def _text_files(args: TrainArgs, sources: list[Source]) -> Iterator[list[str]]:
    """Give the sources as plain text files; documents of other kinds are written out first."""
    from scratchlm.data import iter_documents

    if all(source.kind == "text" and not source.gzipped for source in sources):
        yield [source.path for source in sources]
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        written, field = 0, args.text_field or TEXT_FIELD
        for document in iter_documents([s.path for s in sources], field=field):
            file.write(document + END_OF_TEXT)
            written += len(document)
            if written > SPOOL_BYTES:
                break
        file.flush()
        yield [file.name]
