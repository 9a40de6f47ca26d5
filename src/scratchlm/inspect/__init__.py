"""Look inside: see and change any number inside a model while it runs.

    with inspect(model) as look:
        look.keep("layers.*.attn.weights")
        look.zero("layers.1.attn.heads", heads=[3])
        model(tokens)

`KINDS` lists the points, `points(model)` those of a model.
"""

from scratchlm.inspect.attribution import PARTS, Attribution
from scratchlm.inspect.cache import Cache
from scratchlm.inspect.finding import HeadScores, attention_weights, head_scores
from scratchlm.inspect.look import Look, inspect
from scratchlm.inspect.points import KINDS, Point, points

__all__ = [
    "inspect",
    "Look",
    "Cache",
    "points",
    "Point",
    "KINDS",
    "PARTS",
    "Attribution",
    "attention_weights",
    "head_scores",
    "HeadScores",
]
