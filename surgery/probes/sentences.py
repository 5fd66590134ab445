"""Plain templated sentences, for perplexity and for the KL term. Owns: the templates. Must never know: models."""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Split, draw
from surgery.probes.words import ANSWERS, PLACES, SIZES, THINGS, TIMES, VERBS, WEATHER

TEMPLATES = (
    "The {job} {verb} a {size} {thing} to the {place}.",
    "In the {time} the {pet} went down to the {place}.",
    "A {size} {pet} slept near the {colour} {thing}.",
    "The {job} and the {job2} talked about the {weather} in the {place}.",
    "There was {weather} in the {time}, and the {job} stayed at the {place}.",
    "She {verb} the {colour} {thing} before the {weather} came.",
    "He drank {drink} with the {job} at the {place} every {time}.",
    "When the {time} came, the {size} {place} was full of {weather}.",
)


def sentence(rng: Random, split: Split = "train") -> Document:
    """One sentence; sentences of the two splits differ."""

    def make() -> str:
        return rng.choice(TEMPLATES).format(
            job=rng.choice(ANSWERS["job"]),
            job2=rng.choice(ANSWERS["job"]),
            pet=rng.choice(ANSWERS["pet"]),
            colour=rng.choice(ANSWERS["colour"]),
            drink=rng.choice(ANSWERS["drink"]),
            place=rng.choice(PLACES),
            thing=rng.choice(THINGS),
            size=rng.choice(SIZES),
            verb=rng.choice(VERBS),
            time=rng.choice(TIMES),
            weather=rng.choice(WEATHER),
        )

    return Document("sentence", draw(split, make))
