"""Word lists of the probes. They are seeded, and keys are split into training and evaluation words."""

from __future__ import annotations

from functools import cache

from surgery.probes.documents import Split, rng_of, split_of

SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")

ANSWERS: dict[str, tuple[str, ...]] = {
    "job": ("baker", "pilot", "farmer", "judge", "nurse", "sailor", "tailor", "miner", "poet", "doctor", "painter",
            "hunter", "clerk", "guard", "singer", "cook"),
    "pet": ("fox", "owl", "goat", "horse", "duck", "wolf", "bear", "crab", "frog", "sheep", "mouse", "crow", "eagle",
            "snake", "tiger", "whale"),
    "colour": ("red", "green", "blue", "black", "white", "brown", "pink", "grey", "gold", "silver", "purple", "orange",
               "yellow", "violet", "cyan", "amber"),
    "drink": ("tea", "milk", "juice", "water", "coffee", "cider", "cocoa", "wine", "soda", "broth", "punch", "lemonade",
              "ale", "mead", "syrup", "tonic"),
}  # fmt: skip
RELATIONS = tuple(ANSWERS)

PLACES = ("market", "river", "harbour", "forest", "castle", "village", "bridge", "garden", "mill", "tower")
THINGS = ("basket", "letter", "lamp", "rope", "coat", "barrel", "map", "coin", "book", "bell", "chair", "knife")
SIZES = ("small", "large", "old", "new", "heavy", "light")
VERBS = ("carried", "brought", "sold", "lost", "found", "showed", "threw", "took")
TIMES = ("morning", "evening", "night", "summer", "winter", "spring")
WEATHER = ("rain", "snow", "wind", "fog", "storm", "sun")
FILLER = (*PLACES, *SIZES, *THINGS, *TIMES)  # words between a key and its value


@cache
def key_words(split: Split) -> tuple[str, ...]:
    """Return the keys of dictionaries: invented words of two syllables. One in five is for evaluation.

    Words that occur inside a template word are excluded, since the small tokenizer could have one token for them.
    """
    known = " ".join((*(w for a in ANSWERS.values() for w in a), *PLACES, *THINGS, *VERBS, *TIMES))
    words = [a + b for a in SYLLABLES for b in SYLLABLES if a[0] != b[0] and a + b not in known]
    rng_of("keys").shuffle(words)
    return tuple(w for w in words[:1500] if split_of(w, 5) == split)


@cache
def entity_names() -> tuple[str, ...]:
    """Return the names of invented people for the closed-book facts: three syllables, capitalized, all different."""
    rng = rng_of("entities")
    names: dict[str, None] = {}
    while len(names) < 100:
        names["".join(rng.sample(SYLLABLES, 3)).capitalize()] = None
    return tuple(names)
