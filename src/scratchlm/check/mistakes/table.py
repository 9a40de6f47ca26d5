"""What a known mistake is: a wrong function, its name, and three hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """A way to get one function wrong, with the numbers that come of it.

    `functions` are its spellings, where one mistake gives several sets of numbers (a mask of −10 or
    of −100). `hints` go from a nudge by a pointer to the line.
    """

    task: str
    name: str
    hints: tuple[str, str, str]
    functions: tuple[Callable[..., Any], ...]
    double: bool = False  # two mistakes that often come together, named as two


class Table(dict[str, list[Mistake]]):
    """The known mistakes of some functions, by the function's name."""

    def add(
        self,
        task: str,
        name: str,
        hints: tuple[str, str, str],
        *functions: Callable[..., Any],
        double: bool = False,
    ) -> None:
        """Enter one mistake."""
        self.setdefault(task, []).append(Mistake(task, name, hints, functions, double))
