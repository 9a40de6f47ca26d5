"""What a function gave in one case: named values, compared cell by cell, written as JSON.

An outcome is a dict. `raises` stands for an error, `complaint` for something that is wrong whatever
the numbers are (a wrong type, a changed input); every other entry is a tensor, a list, a text or
None (a gradient that never arrived).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Outcome = dict[str, Any]

TOLERANCE = 2e-5  # of the largest value: a function may compute in float32
LOW_TOLERANCE = 2e-2  # for 16-bit input
MATCHING = 10  # times the tolerance, to tell that two wrong functions are the same
SMALL = 1e-2  # below this, the largest value counts as this
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Difference:
    """Where an outcome leaves the definition first."""

    what: str  # "result", "gradient of weights", …
    text: str  # one line: cell, got, expected


def differences(got: Outcome, want: Outcome) -> list[Difference]:
    """List the entries in which an outcome leaves another; none: they agree."""
    for kind in ("complaint", "raises"):
        if kind in got:
            return [Difference(kind, got[kind])]
    found = (_difference(name, got.get(name), wanted) for name, wanted in want.items())
    return [one for one in found if one is not None]


def _difference(name: str, got: Any, want: Any) -> Difference | None:
    if isinstance(want, Tensor):
        return _tensor_difference(name, got, want)
    if got == want:
        return None
    if isinstance(want, list) and isinstance(got, list):
        return Difference(name, _list_difference(got, want))
    return Difference(name, f"got {shown(got)}, expected {shown(want)}")


def _tensor_difference(name: str, got: Any, want: Tensor) -> Difference | None:
    if not isinstance(got, Tensor):
        what = "no gradient arrives" if got is None else f"got {shown(got)}"
        return Difference(name, f"{what}; expected {_of_shape(want)}")
    if got.shape != want.shape:
        return Difference(name, f"got {_of_shape(got)}; expected {_of_shape(want)}")
    if want.dtype in LOW and got.dtype != want.dtype:
        kinds = f"{_kind(got)} for {_kind(want)} input; expected {_kind(want)}"
        return Difference(name, f"got {kinds}")
    wrong = wrong_cells(got, want)
    if not wrong.any():
        return None
    cell = tuple(wrong.nonzero()[0].tolist())
    at = f"[{', '.join(map(str, cell))}] " if cell else ""
    many = f" ({int(wrong.sum())} of {wrong.numel()} wrong)" if wrong.numel() > 1 else ""
    return Difference(name, f"{at}got {_number(got[cell])}, expected {_number(want[cell])}{many}")


def wrong_cells(got: Tensor, want: Tensor, times: float = 1.0) -> Tensor:
    """Mark the cells that are off by more than rounding; what is not finite must not be in both."""
    share = times * (LOW_TOLERANCE if want.dtype in LOW else TOLERANCE)
    got, want = got.double(), want.double()
    finite = want.isfinite()
    scale = want[finite].abs().max().item() if finite.any() else 0.0
    near = (got - want).abs() <= share * max(scale, SMALL)
    return ~torch.where(finite, near, ~got.isfinite())


def agree(got: Outcome, want: Outcome, times: float = 1.0) -> bool:
    """Say whether two outcomes are the same: both raise, or all entries agree."""
    if "complaint" in got or "complaint" in want:
        return False
    if "raises" in got or "raises" in want:
        return "raises" in got and "raises" in want
    return all(_same(got.get(name), wanted, times) for name, wanted in want.items())


def _same(got: Any, want: Any, times: float) -> bool:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return not isinstance(want, Tensor) and not isinstance(got, Tensor) and bool(got == want)
    if got.shape != want.shape or (want.dtype in LOW and got.dtype != want.dtype):
        return False
    return not bool(wrong_cells(got, want, times).any())


def _list_difference(got: list[Any], want: list[Any]) -> str:
    for place, (one, other) in enumerate(zip(got, want, strict=False)):
        if one != other:
            return f"[{place}] got {shown(one)}, expected {shown(other)}"
    return f"got {len(got)} entries, expected {len(want)}"


def _number(cell: Tensor) -> str:
    return f"{cell.item():.6g}"


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def shown(value: Any, limit: int = 60) -> str:
    """Print a value on one line, cut where it is long."""
    if isinstance(value, Tensor):
        text = _rounded(value) if value.numel() <= 12 else _of_shape(value)
    else:
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _rounded(value: Tensor) -> str:
    def short(entry: Any) -> Any:
        if isinstance(entry, list):
            return [short(e) for e in entry]
        return float(f"{entry:.4g}") if isinstance(entry, float) else entry

    return str(short(value.tolist()))


# Between processes: JSON, with a tensor as its bytes


def pack(value: Any) -> Any:
    """Turn a value into what JSON can hold."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        data = base64.b64encode(raw).decode("ascii")
        return {"tensor": data, "shape": list(value.shape), "dtype": _kind(value)}
    if isinstance(value, dict):
        return {"dict": [[str(key), pack(entry)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [pack(entry) for entry in value]
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def unpack(value: Any) -> Any:
    """Read what `pack` wrote."""
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "dict" in value:
        return {key: unpack(entry) for key, entry in value["dict"]}
    dtype = getattr(torch, value["dtype"])
    raw = bytearray(base64.b64decode(value["tensor"]))
    if not raw:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(value["shape"])
