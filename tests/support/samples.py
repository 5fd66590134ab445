"""A few documents of every task."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import fact_question, fact_statement, facts, letter_choice
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.registry import PROBES, Options
from surgery.probes.sentences import sentence

MAKERS: dict[str, Callable[[Random], Document]] = {
    "kv_retrieval": lambda rng: kv_document(rng, rng.randint(2, 6)),
    "letter_choice": letter_choice,
    "option_text": lambda rng: letter_choice(rng, lettered=False),
    "closed_book": lambda rng: fact_question(rng.choice(facts())),
    "statement": lambda rng: fact_statement(rng.choice(facts())),
    "sentence": sentence,
}
ASKING = ("kv_retrieval", "letter_choice", "option_text", "closed_book")
RETRIEVING = ("kv_retrieval", "letter_choice")
TEXT_PROMPTS = (
    "Where is the fox?",
    "In the morning the old baker went to the market.\nWho?",
    "12:",
    "A red door, a blue",
)


def sample(task: str, count: int = 4, seed: int = 0) -> list[Document]:
    rng = rng_of("sample", task, seed)
    return [MAKERS[task](rng) for _ in range(count)]


def several_questions(count: int = 3, seed: int = 0) -> list[Document]:
    """Dictionaries of different lengths, with different numbers of questions."""
    rng = rng_of("several", seed)
    return [kv_document(rng, pairs=3 + i, questions=1 + i) for i in range(count)]


def document_of(task: str, seed: int = 0, **options: Any) -> Document:
    """A document of a probe for training."""
    return PROBES[task].generate(rng_of(seed), "train", Options(**options))


def cut(document: Document, span: tuple[int, int] | None) -> str:
    """The text of a span."""
    assert span is not None
    return document.text[span[0] : span[1]]
