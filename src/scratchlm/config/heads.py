"""What stands on a trunk instead of the LM head: a classifier, or the two ends of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scratchlm.errors import check_keys

HEADS = ("classification", "qa")


@dataclass(frozen=True)
class TaskHead:
    """A task's head; a classifier has a name for each of its labels."""

    kind: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise ValueError(f"a task must be one of {', '.join(HEADS)}; got {self.kind!r}")
        object.__setattr__(self, "labels", tuple(self.labels))
        if not all(isinstance(label, str) and label for label in self.labels):
            raise TypeError("labels must be texts that are not empty")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels must differ from each other")
        if self.kind == "classification" and len(self.labels) < 2:
            raise ValueError(f"a classifier needs two labels at least; got {len(self.labels)}")
        if self.kind == "qa" and self.labels:
            raise ValueError("question answering has no labels")

    def to_dict(self) -> dict[str, Any]:
        """Write as plain values."""
        return {"kind": self.kind, **({"labels": list(self.labels)} if self.labels else {})}

    @classmethod
    def from_dict(cls, values: Any) -> TaskHead:
        """Read plain values; unknown keys are refused by name."""
        if not isinstance(values, dict) or not isinstance(values.get("labels", []), list):
            raise TypeError("a head must be a table with kind and labels")
        check_keys(values, ("kind", "labels"), "head.")
        return cls(values.get("kind", ""), tuple(values.get("labels", ())))
