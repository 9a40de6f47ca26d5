"""Synthetic stories with exactly known next-word probabilities and entropy."""

from scratchlm.data.stories.grammar import END, Grammar, Variable
from scratchlm.data.stories.source import Entropy, StorySource, spelled, to_text, to_words
from scratchlm.data.stories.world import STORIES

__all__ = [
    "StorySource",
    "Entropy",
    "STORIES",
    "Grammar",
    "Variable",
    "END",
    "spelled",
    "to_text",
    "to_words",
]
