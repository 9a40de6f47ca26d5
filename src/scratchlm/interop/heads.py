"""Task heads in Hugging Face's layout: `…ForSequenceClassification`, `…ForQuestionAnswering`.

A family's trunk has the same tensors under every head. transformers calls it `model` under a
classifier and `transformer` under question answering, except where a class says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from scratchlm.config import ModelConfig
from scratchlm.config.heads import TaskHead
from scratchlm.interop.keys import FAMILIES, Family, Key, Table
from scratchlm.interop.shapes import Shape, parameter_shapes
from scratchlm.untrusted import shown

ARCHITECTURES = {"classification": "ForSequenceClassification", "qa": "ForQuestionAnswering"}
_KEYS: dict[str, Table] = {
    "classification": (Key("score.weight", "score.weight"),),
    "qa": (Key("span.weight", "qa_outputs.weight"), Key("span.bias", "qa_outputs.bias")),
}
# Families of which transformers has these classes with a trunk of that name.
_QA_TRUNKS = {
    **{"llama": "transformer.", "qwen2": "transformer.", "qwen3": "transformer."},
    **{"mistral": "model.", "gpt2": "transformer."},
}
_MAX_LABELS = 1 << 16


def head_shapes(config: ModelConfig, head: TaskHead) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of the state dict of a trunk with this head."""
    yield from (item for item in parameter_shapes(config) if item[0] != "lm_head.weight")
    if head.kind == "classification":
        yield "score.weight", (len(head.labels), config.d_model)
    else:
        yield "span.weight", (2, config.d_model)
        yield "span.bias", (2,)


def shapes_of(config: ModelConfig, head: TaskHead | None) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a language model, or of a trunk with a head."""
    return parameter_shapes(config) if head is None else head_shapes(config, head)


def family_with(model_type: str, head: TaskHead | None) -> Family:
    """Return a family as it is stored with a head of this kind."""
    family = FAMILIES[model_type]
    if head is None:
        return family
    if model_type not in _QA_TRUNKS:
        raise ValueError(
            f"task heads are known of {', '.join(_QA_TRUNKS)}; got model_type {model_type}"
        )
    trunk = _QA_TRUNKS[model_type] if head.kind == "qa" else ""
    return replace(
        family,
        architecture=architecture_of(model_type, head.kind),
        tables=tuple(_with_head(table, head.kind, trunk) for table in family.tables[:1]),
    )


def architecture_of(model_type: str, kind: str) -> str:
    """Return the name of the class of a family that has this head."""
    name = FAMILIES[model_type].architecture
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + ARCHITECTURES[kind]


def _with_head(table: Table, kind: str, trunk: str) -> Table:
    keys = []
    for key in table:
        if key.ours != "lm_head.weight":
            theirs = key.theirs
            if trunk and theirs.startswith("model."):
                theirs = trunk + theirs.removeprefix("model.")
            keys.append(replace(key, theirs=theirs))
    return (*keys, *_KEYS[kind])


def head_of(table: Mapping[str, Any]) -> TaskHead | None:
    """Read from config.json which head a model has; None: a language model's."""
    model_type, architectures = table.get("model_type"), table.get("architectures")
    if not isinstance(model_type, str) or model_type not in _QA_TRUNKS:
        return None
    for kind in ARCHITECTURES:
        if architectures == [architecture_of(model_type, kind)]:
            return TaskHead("qa") if kind == "qa" else TaskHead(kind, _labels(table))
    return None


def _labels(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the names of the labels, in their order; transformers has two unless it is said."""
    names = table.get("id2label")
    if names is None:
        count = table.get("num_labels", 2)
        if type(count) is not int or not 2 <= count <= _MAX_LABELS:
            raise ValueError(f"num_labels must be 2 at least; got {shown(count)}")
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or not 2 <= len(names) <= _MAX_LABELS:
        raise ValueError(f"id2label must name two labels at least; got {shown(names)}")
    wanted = [str(i) for i in range(len(names))]
    if sorted(names) != sorted(wanted) or not all(isinstance(n, str) for n in names.values()):
        raise ValueError(f"id2label must name the labels from 0 on; got {shown(names)}")
    if table.get("problem_type") not in (None, "single_label_classification"):
        raise ValueError(
            f"problem_type must be single_label_classification; got {shown(table['problem_type'])}"
        )
    return tuple(names[number] for number in wanted)


def head_words(head: TaskHead, pad_token_id: int | None) -> dict[str, Any]:
    """Write what config.json says of a head."""
    words: dict[str, Any] = {"pad_token_id": pad_token_id}
    if head.kind == "classification":
        words["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
        words["label2id"] = {label: i for i, label in enumerate(head.labels)}
        words["problem_type"] = "single_label_classification"
    return words
