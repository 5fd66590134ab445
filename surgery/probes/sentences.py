"""Plain sentences from templates, for perplexity and for KL terms."""

from __future__ import annotations

from random import Random

from surgery.probes.documents import Document, Split, draw, split_of
from surgery.probes.registry import Half, Options, Probe, register_probe
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
    """Generate a sentence. The splits have different sentences."""

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


def sentence_half(rng: Random, half: Half | None, split: Split = "train") -> Document:
    """Generate a sentence of one half, or of either if None. The text's hash decides, so the halves are disjoint."""
    while True:
        document = sentence(rng, split)
        if half is None or (split_of(document.text[::-1], 2) == "eval") == bool(half):
            return document


@register_probe("sentence")
class Sentence(Probe):
    """Templated sentences to train on: `sentence_half`."""

    evaluates = False
    scoring = "perplexity"
    options = ("half",)
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return sentence_half(rng, options.half, split)


class Perplexity(Probe):
    """Perplexity on sentences of the half `evaluated`."""

    trains = False
    scoring = "perplexity"
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        return sentence_half(rng, self.evaluated, split if self.evaluated else "train")


@register_probe("perplexity")
class HeldOutPerplexity(Perplexity):
    """Perplexity on evaluation sentences of the half that is held out from training."""

    label = "perplexity, held-out"
    seed_name = "text"


@register_probe("perplexity_seen")
class SeenPerplexity(Perplexity):
    """Perplexity on training sentences of the half that training may use."""

    label = "perplexity, seen half"
    seed_name = "seen"
    evaluated = 0
