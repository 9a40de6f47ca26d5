"""A learner's file: a right one, and edits of it that make it wrong in a known way."""

from dataclasses import dataclass, field


@dataclass
class Learner:
    """One function's right file, and its edits: (mistake, old text or texts, new ones)."""

    task: str
    source: str
    edits: list = field(default_factory=list)
    hidden: set = field(default_factory=set)  # pairs of edits one of which undoes the other

    def wrong(self, *edits):
        """Return the file with some edits, or None where one leaves the other no place."""
        source = self.source
        for _, old, new in edits:
            for was, now in zip(
                *((x,) if isinstance(x, str) else x for x in (old, new)), strict=True
            ):
                if was not in source:
                    return None
                source = source.replace(was, now)
        return source
