"""Batches for training. Owns: which generated documents step i sees. Must never know: models, losses, files.

A step's documents depend on (seed, source, step) alone: no loader state, so a resumed run sees what an uninterrupted
one would have, and every process takes its own rows of the same global batch. Documents of the user's own are streams
of the same kind (`userdata.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import Options
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
            return step_documents(self.source, self.seed, self.index, step, self.tokenizer)
        chosen: list[Document] = []
        room = self.source.tokens
        for document, size in self._sized(self._maker(step)):
            room -= size
            if chosen and room < 0:
                break
            chosen.append(document)
        return chosen

    def _maker(self, step: int) -> Callable[[], Document]:
        return maker(self.source, rng_of("train", self.seed, self.index, step), self.tokenizer)

    def _sized(self, make: Callable[[], Document]) -> Iterator[tuple[Document, int]]:
        """Documents without end, each with its number of tokens."""
        while True:
            documents = [make() for _ in range(_DRAWN_TOGETHER)]
            ids = self.tokenizer([d.text for d in documents], add_special_tokens=False)["input_ids"]
            yield from zip(documents, map(len, ids), strict=True)


def with_ends(document: Document) -> Document:
    """The newline behind every answer becomes a part of it. To be chosen among, answers would have to be without."""
    text = document.text if document.text.endswith("\n") else document.text + "\n"
    ended = [replace(q, answer=(q.answer[0], q.answer[1] + 1), choices=()) for q in document.questions]
    return replace(document, text=text, questions=tuple(ended))


def maker(source: Source, rng: Random, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], Document]:
    """Return a function that draws the documents of one step from `rng`. They all have the same number of pairs.

    Args:
        tokenizer: for probes whose text depends on one (mqar, phonebook, needles).

    Raises:
        ProbeError: the probe needs a tokenizer and there is none, or it has too few words for the pairs.
    """
    probe = source.probe
    assert probe is not None, "a source without a task has data of the user's own"
    probe.check_tokenizer(tokenizer)
    pairs = rng.randint(*source.pairs) if probe.pairs is not None else 0
    options = Options(
        pairs=pairs,
        questions=min(source.questions, pairs),
        groups=source.groups,
        needles=pairs,
        tokens=source.max_tokens or 0,
        half=source.half,
        tokenizer=tokenizer,
    )

    def make() -> Document:
        document = probe.document(rng, "train", options)
        return with_ends(document) if source.end else document

    return make


def step_documents(
    source: Source, seed: int, index: int, step: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Document]:
    """The `rows` documents that a generator, the `index`-th source of the recipe, contributes to `step`.

    Args:
        tokenizer: as in `maker`.
    """
    assert source.rows is not None, "steps of so many tokens are made by GeneratedStream"
    make = maker(source, rng_of("train", seed, index, step), tokenizer)
    return [make() for _ in range(source.rows)]
