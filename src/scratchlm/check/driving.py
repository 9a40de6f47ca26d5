"""How each kind of function is called, and what is looked at: results, gradients, side effects.

A driver takes a function and the arguments of one case and returns the outcome. The same drivers
run the definition, the known mistakes and the learner's function.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.check.outcomes import Outcome


class Complaint(Exception):
    """What is wrong whatever the numbers are, in one plain line."""


@dataclass(frozen=True)
class Case:
    """One call: named arguments in the order of the signature."""

    name: str
    arguments: dict[str, Any]
    gradients: bool = True
    course: bool = True  # whether the CS336 course asks for this
    given: str = ""  # the arguments in words, where they are too many to print


Driver = Callable[[Callable[..., Any], Case], Outcome]


def drive_tensors(function: Callable[..., Any], case: Case) -> Outcome:
    """Call with tensors: the result, and the gradient of every floating-point input."""
    given = copy.deepcopy(case.arguments)
    result = function(*given.values())
    if not isinstance(result, Tensor):
        raise Complaint(f"returns {_type_of(result)}; expected a tensor")
    for (name, before), (_, after) in zip(leaves(case.arguments), leaves(given), strict=False):
        if not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise Complaint(f"changes its input {name} in place")
    outcome: Outcome = {"result": result.detach().clone()}
    if case.gradients:
        outcome.update(_gradients(function, case))
    return outcome


def _gradients(function: Callable[..., Any], case: Case) -> Outcome:
    given = copy.deepcopy(case.arguments)
    inputs = {name: leaf for name, leaf in leaves(given) if leaf.is_floating_point()}
    for leaf in inputs.values():
        leaf.requires_grad_()
    result = function(*given.values())
    arrived: list[Tensor | None] = [None] * len(inputs)
    if result.requires_grad:
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).cos() + 0.3
        weighed = (result * weight.view_as(result).to(result.dtype)).sum()
        arrived = list(torch.autograd.grad(weighed, list(inputs.values()), allow_unused=True))
    return {f"gradient of {name}": g for name, g in zip(inputs, arrived, strict=True)}


def leaves(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the arguments, those in a dict of weights by their name."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}[{key}]", w) for key, w in value.items() if isinstance(w, Tensor))


def drive_schedule(function: Callable[..., Any], case: Case) -> Outcome:
    """Ask for the learning rate at many steps."""
    steps, *rest = case.arguments.values()
    rates = [function(step, *rest) for step in steps]
    for rate in rates:
        if isinstance(rate, Tensor) and rate.numel() == 1:
            continue
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise Complaint(f"returns {_type_of(rate)}; expected a number")
    return {"learning rate": torch.tensor([float(rate) for rate in rates], dtype=torch.float64)}


def drive_optimizer(get_class: Callable[..., Any], case: Case) -> Outcome:
    """Move parameters by given gradients, a few steps; the rate may change on the way."""
    kind = get_class()
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise Complaint(f"returns {_type_of(kind)}; expected a subclass of torch.optim.Optimizer")
    a = case.arguments
    parameters = [torch.nn.Parameter(p.clone()) for p in a["parameters"]]
    options = {name: a[name] for name in ("lr", "betas", "eps", "weight_decay")}
    groups: list[Any] = parameters
    if "decays" in a:
        groups = [
            {"params": [p], "weight_decay": decay}
            for p, decay in zip(parameters, a["decays"], strict=True)
        ]
    optimizer = kind(groups, **options)
    outcome: Outcome = {}
    for step, gradients in enumerate(a["gradients"]):
        for group in optimizer.param_groups:
            group["lr"] = a["lr"] * a.get("factors", [1.0] * 99)[step]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        for index, p in enumerate(parameters):
            outcome[f"parameter {index} after step {step + 1}"] = p.detach().clone()
    return outcome


def drive_clipping(function: Callable[..., Any], case: Case) -> Outcome:
    """Clip given gradients; look at them and at the parameters."""
    a = case.arguments
    parameters = [torch.nn.Parameter(p.clone()) for p in a["parameters"]]
    for p, gradient in zip(parameters, a["gradients"], strict=True):
        p.grad = None if gradient is None else gradient.clone()
    once = a.get("as_generator", False)
    function((p for p in parameters) if once else parameters, a["max_l2_norm"])
    for index, (p, before) in enumerate(zip(parameters, a["parameters"], strict=True)):
        if not torch.equal(p.detach(), before):
            raise Complaint(f"changes parameter {index} itself, not its gradient")
    return {f"gradient {i}": None if p.grad is None else p.grad for i, p in enumerate(parameters)}


def drive_bpe_training(function: Callable[..., Any], case: Case) -> Outcome:
    """Learn from a file; ids may be given in any order, the merges may not."""
    a = case.arguments
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        path.write_bytes(a["text"].encode("utf-8"))
        found = function(str(path), a["vocab_size"], list(a["special_tokens"]))
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], dict)):
        raise Complaint(f"returns {_type_of(found)}; expected a tuple: a dict and a list")
    vocab, merges = found
    if not all(isinstance(k, int) and isinstance(v, bytes) for k, v in vocab.items()):
        raise Complaint("returns a vocabulary that is not a dict of int to bytes")
    if not all(len(pair) == 2 and all(isinstance(p, bytes) for p in pair) for pair in merges):
        raise Complaint("returns merges that are not pairs of bytes")
    return {
        "merges": [list(pair) for pair in merges],
        "ids": sorted(vocab),
        "tokens": sorted(vocab.values()),
    }


def drive_tokenizer(function: Callable[..., Any], case: Case) -> Outcome:
    """Encode texts whole and in pieces, and decode ids."""
    a = case.arguments
    tokenizer = function(dict(a["vocab"]), list(a["merges"]), list(a["special_tokens"]))
    outcome: Outcome = {}
    for text in a.get("texts", ()):
        ids = tokenizer.encode(text)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise Complaint(f"encode returns {_type_of(ids)}; expected a list of int")
        outcome[f"encode({text!r})"] = ids
    for pieces in a.get("streams", ()):
        outcome[f"encode_iterable({pieces!r})"] = list(tokenizer.encode_iterable(iter(pieces)))
    for ids in a.get("ids", ()):
        outcome[f"decode({ids})"] = tokenizer.decode(list(ids))
    return outcome


def _type_of(value: Any) -> str:
    """Name a value by its type, with the article: a list, an int."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Copy arguments with their float64 tensors in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float64 else value
    if isinstance(value, dict):
        return {key: to_dtype(entry, dtype) for key, entry in value.items()}
    if isinstance(value, list):
        return [to_dtype(entry, dtype) for entry in value]
    return value


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Draw float64 numbers of the order of 1, the same every time."""
    state = torch.Generator().manual_seed(1000 * sum(shape) + seed)
    return torch.randn(*shape, generator=state, dtype=torch.float64) * scale
