"""`scratchlm predict`: classify texts, or find answers, with a model that has a task head."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.device import Device, choose_device
from scratchlm.cli.terminal import say, warn
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import listed, shown

if TYPE_CHECKING:
    from scratchlm.inference.heads import LoadedHead

LABELS_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("predict")(predict)


def predict(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.")],
    data: Annotated[
        Path | None,
        typer.Argument(help="Records as for `finetune --task`; their answers may be missing."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to classify; may be repeated.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="A question to answer.")] = None,
    context: Annotated[str | None, typer.Option(help="The text that holds its answer.")] = None,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    accelerate: Annotated[bool, typer.Option(help="Use fused layers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Lines.")] = False,
) -> None:
    """Classify texts or find answers; where records hold the truth, say how many are right."""
    from scratchlm.inference.heads import load_head

    asked = _records(data, text, question, context)
    loaded = load_head(
        model,
        device=choose_device(device),
        accelerate=accelerate,
        checkpoint=checkpoint,
        warn=warn,
    )
    _check_kind(loaded.head.kind, texts=bool(text), question=question is not None)
    lines, right = (_classes if loaded.head.kind == "classification" else _answers)(loaded, asked)
    say_checkpoint(model, loaded.source)
    for line in lines:
        say(json.dumps(line, ensure_ascii=False) if as_json else _shown(line))
    if right:
        _say_share(right, as_json)


def _check_kind(kind: str, *, texts: bool, question: bool) -> None:
    """Refuse options that ask for another head than the model's."""
    if kind == "classification" and question:
        raise ValueError("the model classifies texts: give --text, not --question and --context")
    if kind != "classification" and texts:
        raise ValueError("the model answers questions: give --question and --context, not --text")


def _records(
    data: Path | None, texts: Sequence[str] | None, question: str | None, context: str | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what is asked, each with the place it came from."""
    if (question is None) != (context is None):
        raise ValueError("--question and --context belong together")
    given = [data is not None, bool(texts), question is not None]
    if sum(given) != 1:
        raise ValueError("give DATA, or --text, or --question and --context")
    if data is not None:
        from scratchlm.data.records import read_records

        records: list[tuple[str, Mapping[str, Any]]] = list(read_records(data))
        if not records:
            raise ScratchLMError(f"{data}: there are no records")
        return records
    if texts:
        return [("--text", {"text": one}) for one in texts]
    return [("--question", {"question": question, "context": context})]


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Say which record an error is of."""
    try:
        yield
    except (ValueError, ScratchLMError) as error:
        raise ScratchLMError(f"{place}: {error}") from None


def _field(record: Mapping[str, Any], name: str, place: str) -> str:
    if name not in record:
        got = ", ".join(map(shown, list(record)[:8])) or "nothing"
        raise ScratchLMError(f"{place}: a record must have {name}; it has {got}")
    value = record[name]
    if not isinstance(value, str):
        raise ScratchLMError(f"{place}: {name} must be text; got {value!r:.40}")
    return value


def _classes(
    loaded: LoadedHead, asked: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[list[dict[str, Any]], list[bool]]:
    from scratchlm.inference.heads import classify, encode_text

    texts = [_field(record, "text", place) for place, record in asked]
    for text, (place, record) in zip(texts, asked, strict=True):
        with _at(place):
            encode_text(loaded, text)
            if "label" in record and str(record["label"]) not in loaded.head.labels:
                labels = listed(loaded.head.labels)
                raise ValueError(f"label must be one of {labels}; got {shown(record['label'])}")
    lines, right = [], []
    for text, (_, record), found in zip(texts, asked, classify(loaded, texts), strict=True):
        label = next(iter(found))
        lines.append({"text": text, "label": label, "probabilities": found})
        if "label" in record:
            right.append(str(record["label"]) == label)
    return lines, right


def _answers(
    loaded: LoadedHead, asked: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[list[dict[str, Any]], list[bool]]:
    from scratchlm.inference.heads import answer, encode_question

    pairs = [
        (_field(record, "question", place), _field(record, "context", place))
        for place, record in asked
    ]
    for pair, (place, _) in zip(pairs, asked, strict=True):
        with _at(place):
            encode_question(loaded, *pair)
    lines, right = [], []
    for pair, (place, record), found in zip(pairs, asked, answer(loaded, pairs), strict=True):
        lines.append({"question": pair[0], **vars(found)})
        if "answer" in record:
            right.append(_field(record, "answer", place).strip() == found.text)
    return lines, right


def _shown(line: Mapping[str, Any]) -> str:
    if "question" in line:
        return f"{line['probability']:.4f}  {line['text']}"
    best = list(line["probabilities"].items())[:LABELS_SHOWN]
    return "  ".join(f"{label} {share:.4f}" for label, share in best)


def _say_share(right: Sequence[bool], as_json: bool) -> None:
    from scratchlm.cli.evaluation_output import format_estimate
    from scratchlm.evaluation import wilson_interval

    share = wilson_interval(sum(right), len(right))
    text = f"right: {sum(right):,} of {len(right):,}, {format_estimate(share)}"
    say(text, err=as_json)
