"""Batches for training. Owns: which generated documents step i sees. Must never know: models, losses, files.

A step's documents depend on (seed, source, step) alone: no loader state, so a resumed run sees what an uninterrupted
one would have, and every process takes its own rows of the same global batch. Documents of the user's own are streams
of the same kind (`userdata.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from surgery.probes.copying import copying_document
from surgery.probes.documents import Document, Split, rng_of, split_of
from surgery.probes.knowledge import Fact, fact_question, fact_statement, facts, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.sentences import sentence
from surgery.recipe import Source

_DRAWN_TOGETHER = 16  # documents tokenized at a time where a step is a number of tokens


class Stream(Protocol):
    """What one source contributes.

    Attributes:
        skipped: rows that could not be used and were left out.
    """

    skipped: int

    def step(self, step: int) -> list[Document]:
        """All processes' documents of a step, counted from 0: the same in whatever order steps are asked for."""
        ...


class GeneratedStream:
    """Documents of one of the toolkit's generators.

    Args:
        index: of the source in the recipe.
    """

    def __init__(self, source: Source, tokenizer: PreTrainedTokenizerBase, seed: int, index: int) -> None:
        self.source, self.tokenizer, self.seed, self.index = source, tokenizer, seed, index
        self.skipped = 0

    def step(self, step: int) -> list[Document]:
        """`rows` documents; or as many as `tokens` hold, one at least: the first that crosses them is left out."""
        if self.source.tokens is None:
            return step_documents(self.source, self.seed, self.index, step)
        chosen: list[Document] = []
        room = self.source.tokens
        for document, size in self._sized(maker(self.source, rng_of("train", self.seed, self.index, step))):
            room -= size
            if chosen and room < 0:
                break
            chosen.append(document)
        return chosen

    def _sized(self, make: Callable[[], Document]) -> Iterator[tuple[Document, int]]:
        """Documents without end, each with its number of tokens."""
        while True:
            documents = [make() for _ in range(_DRAWN_TOGETHER)]
            ids = self.tokenizer([d.text for d in documents], add_special_tokens=False)["input_ids"]
            yield from zip(documents, map(len, ids), strict=True)


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


def maker(source: Source, rng: Random) -> Callable[[], Document]:
    """What draws one step's documents from `rng`, one a call; those of kv_retrieval and copying are all as long."""
    if source.task in ("kv_retrieval", "copying"):
        pairs = rng.randint(*source.pairs)
        if source.task == "copying":
            return lambda: copying_document(rng, pairs)
        questions = min(source.questions, pairs)
        return lambda: kv_document(rng, pairs, questions)
    if source.task == "sentence":
        return lambda: sentence_half(rng, source.half)
    if source.task in ("letter_choice", "option_text"):
        make = letter_choice if source.task == "letter_choice" else option_text
        return lambda: make(rng)
    tell = fact_question if source.task == "closed_book" else fact_statement
    return lambda: tell(rng.choice(fact_half(source.half)))


def step_documents(source: Source, seed: int, index: int, step: int) -> list[Document]:
    """The `rows` documents that a generator, the `index`-th source of the recipe, contributes to `step`."""
    assert source.rows is not None, "steps of so many tokens are made by GeneratedStream"
    make = maker(source, rng_of("train", seed, index, step))
    return [make() for _ in range(source.rows)]
