"""Generated documents for each training step.

The documents of a step depend only on (seed, source, step). There is no loader state: a resumed run sees the same
documents as an uninterrupted one, and every process takes its rows of the same global batch. The user's own data has
the same interface (`user.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from surgery.data.base_text import stand_in
from surgery.data.offsets import tokenized
from surgery.probes.documents import Document, Question, rng_of
from surgery.probes.registry import Options
from surgery.recipe import Source

_TOKENIZE_TOGETHER = 16  # documents to tokenize at once if the size of a step is in tokens


class Stream(Protocol):
    """Documents of one source, by step."""

    def step(self, step: int) -> list[Document]:
        """Return the documents of a step (from 0), for all processes. The order of calls does not matter."""
        ...


class GeneratedStream:
    """Documents that a probe generates.

    Args:
        tokenizer: required by probes whose text depends on it (mqar, phonebook, needles), and for steps in tokens.
        index: index of the source in the recipe.
    """

    def __init__(self, source: Source, tokenizer: PreTrainedTokenizerBase | None, seed: int, index: int) -> None:
        self.source, self.tokenizer, self.seed, self.index = source, tokenizer, seed, index

    def smallest_and_largest(self) -> list[Document]:
        """Generate a document with the smallest and one with the largest number of `pairs`, which later steps may draw.

        Raises:
            ProbeError: there is no such document, for example because it does not fit into `max_tokens`.
        """
        sizes = dict.fromkeys(self.source.pairs)
        sources = [self.source.model_copy(update={"pairs": (size, size)}) for size in sizes]
        return [maker(source, rng_of("size", self.seed, self.index), self.tokenizer)() for source in sources]

    def step(self, step: int) -> list[Document]:
        """Generate `rows` documents, or as many as fit into `tokens` (at least one)."""
        make = maker(self.source, rng_of("train", self.seed, self.index, step), self.tokenizer)
        if self.source.rows is not None:
            return [make() for _ in range(self.source.rows)]
        assert self.source.tokens is not None and self.tokenizer is not None
        documents: list[Document] = []
        room = self.source.tokens
        while True:
            batch = [make() for _ in range(_TOKENIZE_TOGETHER)]
            for document, tokens in zip(batch, tokenized(self.tokenizer, [d.text for d in batch]), strict=True):
                room -= len(tokens.ids)
                if documents and room < 0:
                    return documents
                documents.append(document)


def maker(source: Source, rng: Random, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], Document]:
    """Return a function that generates the documents of one step. All have the same number of pairs.

    Raises:
        ProbeError: the probe needs a tokenizer and gets none, or the tokenizer has too few words for the pairs.
    """
    if source.base_text is not None:  # not written yet
        assert tokenizer is not None
        text = stand_in(tokenizer, source.max_tokens or 0)
        return lambda: text
    probe = source.probe
    assert probe is not None, "a source without a task has `data`"
    probe.check_tokenizer(tokenizer)
    pairs = rng.randint(*source.pairs) if probe.pairs is not None else 0
    options = Options(
        pairs=pairs,
        questions=min(source.questions, pairs) if pairs else source.questions,
        groups=source.groups,
        needles=pairs or Options.needles,
        tokens=source.max_tokens or 0,
        half=source.split,
        filler=source.filler,
        value_digits=source.value_digits,
        tokenizer=tokenizer,
    )

    def make() -> Document:
        document = probe.generate(rng, "train", options)
        return with_ends(document) if source.train_eos else document

    return make


def with_ends(document: Document) -> Document:
    """Extend every answer by the newline after it. Choices are dropped, since they have no newline."""
    text = document.text if document.text.endswith("\n") else document.text + "\n"
    ended = (Question((q.answer[0], q.answer[1] + 1), (), q.gold, q.segment, q.value) for q in document.questions)
    return Document(document.task, text, tuple(ended))
