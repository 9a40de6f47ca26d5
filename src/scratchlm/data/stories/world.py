"""The world of the demo's stories: its words, their probabilities, and its sentences.

Repeated names, things and places are determined by earlier text: only a model that attends to it
can predict them. A latent variable, the pet's mood, is never stated: it can only be inferred from
how the pet behaves.
The notation of the sentences is explained in `grammar.py`.
"""

from __future__ import annotations

from scratchlm.data.stories.grammar import Distribution, Grammar, Variable


def _uniform(words: list[str]) -> Distribution:
    return dict.fromkeys(words, 1 / len(words))


SHE, HE = ["Anna", "Mia", "Nora", "Lucy"], ["Tom", "Ben", "Oscar", "Paul"]
ONE, MANY = (
    ["ball", "kite", "lamp", "book", "drum", "basket"],
    ["keys", "shoes", "apples", "marbles"],
)

_VARIABLES = {
    "pet": Variable({"cat": 0.45, "dog": 0.40, "hen": 0.15}),
    "seat": Variable(
        depends_on="pet",
        distributions={
            "cat": {"mat": 0.85, "chair": 0.10, "floor": 0.05},
            "dog": {"floor": 0.80, "mat": 0.12, "porch": 0.08},
            "hen": {"fence": 0.70, "roof": 0.20, "chair": 0.10},
        },
    ),
    "mood": Variable({"playful": 0.55, "sleepy": 0.45}),
    "who": Variable(_uniform(SHE + HE)),
    "friend": Variable(_uniform(SHE + HE), other_than="who"),
    "thing": Variable(_uniform(ONE + MANY)),
    "colour": Variable({"red": 0.30, "blue": 0.25, "green": 0.20, "yellow": 0.15, "white": 0.10}),
    "place": Variable(_uniform(["park", "market", "garden", "forest", "village", "harbour"])),
    "spot": Variable({"bed": 0.30, "door": 0.25, "stairs": 0.20, "table": 0.15, "wall": 0.10}),
}

_INDEPENDENT: dict[str, Distribution] = {
    "near": {"behind": 0.40, "beside": 0.35, "near": 0.25},
    "around": {"on": 0.45, "near": 0.30, "around": 0.25},
    "size": {"big": 0.30, "small": 0.25, "old": 0.20, "new": 0.15, "heavy": 0.10},
    "kind": {"black": 0.35, "brown": 0.30, "big": 0.20, "small": 0.15},
    "day": _uniform(["morning", "Monday", "Friday", "Sunday", "evening", "summer"]),
    "part": {"morning": 0.45, "evening": 0.35, "night": 0.20},
    "weather": {"warm": 0.35, "cold": 0.25, "windy": 0.20, "sunny": 0.12, "foggy": 0.08},
    "glad": {"happy": 0.40, "proud": 0.25, "tired": 0.20, "hungry": 0.15},
    "slowly": {"slowly": 0.40, "quickly": 0.30, "quietly": 0.20, "softly": 0.10},
    "walked": {"walked": 0.40, "ran": 0.25, "went": 0.20, "hurried": 0.15},
    "shelf": {"shelf": 0.40, "table": 0.30, "bed": 0.20, "bench": 0.10},
    "saw": {"bird": 0.35, "mouse": 0.30, "bee": 0.20, "leaf": 0.15},
}

_FORMS = {
    "she": dict.fromkeys(SHE, "she") | dict.fromkeys(HE, "he"),
    "She": dict.fromkeys(SHE, "She") | dict.fromkeys(HE, "He"),
    "her": dict.fromkeys(SHE, "her") | dict.fromkeys(HE, "his"),
    "him": dict.fromkeys(SHE, "her") | dict.fromkeys(HE, "him"),
    "it": dict.fromkeys(ONE, "it") | dict.fromkeys(MANY, "them"),
    "they": dict.fromkeys(ONE, "it") | dict.fromkeys(MANY, "they"),
    "They": dict.fromkeys(ONE, "It") | dict.fromkeys(MANY, "They"),
    "was": dict.fromkeys(ONE, "was") | dict.fromkeys(MANY, "were"),
}

_HOME = "The $pet sat on the $seat . @sign:mood @arrival @lost @search @end"
_SPOT = "$thing.They $thing.was ~near the $spot ."

_SENTENCES: dict[str, Distribution] = {
    "story": {"@home": 0.65, "@errand": 0.20, "@game": 0.15},
    # At home: a pet, whose mood shows, and a thing that is lost and found.
    "home": {_HOME: 1.0},
    "sign:playful": {
        "It watched a ~saw .": 0.70,
        "Its tail moved ~slowly .": 0.25,
        "Its eyes were closed .": 0.05,
    },
    "sign:sleepy": {
        "It watched a ~saw .": 0.05,
        "Its tail moved ~slowly .": 0.25,
        "Its eyes were closed .": 0.70,
    },
    "arrival": {
        "$who came back from the $place .": 0.50,
        "In the ~part $who opened the door .": 0.30,
        "It was ~weather , and $who came in ~slowly .": 0.20,
    },
    "lost": {
        "$who.She wanted to find $who.her $colour $thing .": 0.60,
        "$who.She had lost $who.her ~size $thing .": 0.40,
    },
    "search": {
        "@look , and there $thing.they $thing.was .": 0.25,
        "@look , but $thing.they $thing.was not there . @help:mood": 0.75,
    },
    "look": {"$who.She looked ~around the $seat": 1.0},
    "help:playful": {
        f"The $pet jumped up and ran to the $spot . {_SPOT}": 0.95,
        f"The $pet slept on . Then $who saw the $spot . {_SPOT}": 0.05,
    },
    "help:sleepy": {
        f"The $pet jumped up and ran to the $spot . {_SPOT}": 0.05,
        f"The $pet slept on . Then $who saw the $spot . {_SPOT}": 0.95,
    },
    # An errand: a thing goes to a place, where somebody is met, and one of the two carries it on.
    "errand": {
        "@setting $who took $who.her $colour $thing to the $place . In the $place $who.she met "
        "$friend . @talk @pass": 1.0,
    },
    "setting": {
        "It was a ~weather ~day .": 0.40,
        "One ~day": 0.35,
        "On a ~weather ~day": 0.25,
    },
    "talk": {
        "$friend was ~glad .": 0.40,
        "$friend had a ~kind $pet . The $pet sat on the $seat and saw the $thing .": 0.40,
        "$who.She talked to $friend.him ~slowly .": 0.20,
    },
    "pass": {
        "$who gave $friend the $thing . Then they ~walked home , and $friend put $thing.it "
        "~near the ~shelf .": 0.55,
        "$who kept the $thing . Then they ~walked home , and $who put $thing.it "
        "~near the ~shelf .": 0.45,
    },
    # A game: one hides a thing, the other looks for it.
    "game": {
        "$who and $friend were in the $place . @plan $who hid $thing.it ~near the $spot , and "
        "$friend looked for $thing.it . @turn @end": 1.0,
    },
    "plan": {
        "They had the $colour $thing with them .": 0.50,
        "It was ~weather , and they played with the $thing .": 0.50,
    },
    "turn": {
        "$friend.She ~walked to the $spot , and there $thing.they $thing.was .": 0.60,
        "$friend.She did not find $thing.it . At last $who ~walked to the $spot and showed "
        "$friend.him the $thing .": 0.40,
    },
    "end": {
        "$who was ~glad .": 0.50,
        "Then $who.she put the $thing on the ~shelf .": 0.30,
        "In the ~part $who took the $thing to the ~shelf .": 0.20,
    },
}

STORIES = Grammar(_SENTENCES, _VARIABLES, _INDEPENDENT, _FORMS)
