"""Batches for training. Owns: which documents step i sees. Must never know: models, losses.

A step's documents depend on (seed, source, step) alone: no loader state, so a resumed run sees what an uninterrupted
one would have, and every process takes its own rows of the same global batch.
"""

from __future__ import annotations

from functools import cache
from random import Random

from surgery.probes.documents import Document, Split, rng_of, split_of
from surgery.probes.knowledge import Fact, fact_question, fact_statement, facts, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.sentences import sentence
from surgery.recipe import Source


@cache
def fact_half(half: int | None) -> tuple[Fact, ...]:
    """All facts, or those of one half."""
    return tuple(f for f in facts() if half is None or f.half == half)


def sentence_half(rng: Random, half: int | None, split: Split = "train") -> Document:
    """A sentence, of either half or of one: the halves are disjoint by the text's hash."""
    while True:
        document = sentence(rng, split)
        if half is None or (split_of(document.text[::-1], 2) == "eval") == bool(half):
            return document


def step_documents(source: Source, seed: int, index: int, step: int) -> list[Document]:
    """The documents that `source`, the `index`-th of the recipe, contributes to `step`."""
    rng = rng_of("train", seed, index, step)
    if source.task == "kv_retrieval":
        pairs = rng.randint(*source.pairs)
        questions = min(source.questions, pairs)
        return [kv_document(rng, pairs, questions) for _ in range(source.rows)]
    if source.task == "sentence":
        return [sentence_half(rng, source.half) for _ in range(source.rows)]
    if source.task in ("letter_choice", "option_text"):
        make = letter_choice if source.task == "letter_choice" else option_text
        return [make(rng) for _ in range(source.rows)]
    tell = fact_question if source.task == "closed_book" else fact_statement
    return [tell(rng.choice(fact_half(source.half))) for _ in range(source.rows)]
