"""Batches for training. Owns: which generated documents step i sees. Must never know: models, losses, files.

A step's documents depend on (seed, source, step) alone: no loader state, so a resumed run sees what an uninterrupted
one would have, and every process takes its own rows of the same global batch. Documents of the user's own are streams
of the same kind (`userdata.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from random import Random
from typing import Protocol, cast

from transformers import PreTrainedTokenizerBase

from surgery.errors import ProbeError
from surgery.probes.copying import copying_document
from surgery.probes.documents import Document, Split, rng_of, split_of
from surgery.probes.hops import hop_document
from surgery.probes.json_kv import UUID, json_kv_document
from surgery.probes.knowledge import Fact, fact_question, fact_statement, facts, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.mqar import MqarWords, mqar_document, mqar_words
from surgery.probes.needle import Kind, needle_document, token_count
from surgery.probes.phonebook import phonebook_document, space_of
from surgery.probes.sentences import sentence
from surgery.recipe import Source

_SHOTS = 2  # a phonebook's examples, as evaluation has them; fewer where it has no more lines
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


def with_ends(document: Document) -> Document:
    """The newline behind every answer becomes a part of it. To be chosen among, answers would have to be without."""
    text = document.text if document.text.endswith("\n") else document.text + "\n"
    ended = [replace(q, answer=(q.answer[0], q.answer[1] + 1), choices=()) for q in document.questions]
    return replace(document, text=text, questions=tuple(ended))


def maker(source: Source, rng: Random, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], Document]:
    """What draws one step's documents from `rng`, one a call; of one step all have the same number of pairs.

    Args:
        tokenizer: for tasks whose text depends on one (mqar, phonebook, needles).

    Raises:
        ProbeError: a tokenizer that is needed and not given, more pairs than it has words for.
    """
    make = _plain_maker(source, rng, tokenizer)
    return (lambda: with_ends(make())) if source.end else make


def _plain_maker(source: Source, rng: Random, tokenizer: PreTrainedTokenizerBase | None) -> Callable[[], Document]:
    task = source.task
    if task == "sentence":
        return lambda: sentence_half(rng, source.half)
    if task in ("letter_choice", "option_text"):
        make = letter_choice if task == "letter_choice" else option_text
        return lambda: make(rng)
    if task in ("closed_book", "statement"):
        tell = fact_question if task == "closed_book" else fact_statement
        return lambda: tell(rng.choice(fact_half(source.half)))
    pairs = rng.randint(*source.pairs)
    if task in ("mqar", "phonebook") or str(task).startswith("needle_"):
        if tokenizer is None:
            raise ProbeError("tokenizer", None, f"The text of {task} depends on it: give the base's.")
        return _of_tokenizer(source, rng, pairs, tokenizer)
    questions = min(source.questions, pairs)
    if task == "copying":
        return lambda: copying_document(rng, pairs)
    if task == "multi_hop":
        return lambda: hop_document(rng, pairs)
    if task == "json_kv":
        return lambda: json_kv_document(rng, pairs, questions, groups=source.groups or UUID)
    return lambda: kv_document(rng, pairs, questions)


def _of_tokenizer(
    source: Source, rng: Random, pairs: int, tokenizer: PreTrainedTokenizerBase
) -> Callable[[], Document]:
    """The tasks whose text depends on one."""
    questions = min(source.questions, pairs)
    if source.task == "mqar":
        words = training_words(tokenizer)
        return lambda: mqar_document(rng, pairs, words.keys, words.values, questions)
    space = space_of(tokenizer)
    if source.task == "phonebook":
        shots = min(_SHOTS, pairs - 1)
        return lambda: phonebook_document(rng, pairs, min(questions, pairs - shots), shots=shots, space=space)
    assert source.max_tokens is not None, "needles say how long they are"
    kind, length, size = cast(Kind, str(source.task).removeprefix("needle_")), source.max_tokens, token_count(tokenizer)
    return lambda: needle_document(rng, length, size, kind, depth=rng.random(), needles=pairs, space=space)


@lru_cache(maxsize=4)
def training_words(tokenizer: PreTrainedTokenizerBase) -> MqarWords:
    """`mqar_words` of training: every token is looked at, so once a tokenizer and not once a step."""
    return mqar_words(tokenizer, "train")


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
