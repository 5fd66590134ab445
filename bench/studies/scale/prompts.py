"""Prompts of the study, and answers to many questions about one context in one pass.

A long context is computed once. Each question continues from a copy of its states, so it is answered as if it were the
only one. A prompt of 100 pairs costs a sixteenth of what a prompt for each question would cost.

Shape legend: Q questions of one length, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.generation import is_match
from surgery.files.atomic import fingerprint
from surgery.probes.documents import Document, Question, rng_of
from surgery.probes.registry import PROBES, Options

SEED = 900  # of the prompts. Neither locating nor training uses it


@dataclass(frozen=True)
class Kind:
    """One kind of prompts: the probe and its sizes, with the words of the evaluation split."""

    name: str
    probe: str
    pairs: int
    filler: tuple[int, int] | None = None
    value_digits: tuple[int, int] | None = None

    @property
    def one_token(self) -> bool:
        """Whether the base's tokenizer has one token for each value."""
        return self.value_digits is None

    def documents(self, count: int, questions: int, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
        """Generate contexts, each with its questions."""
        sizes: dict[str, Any] = {"filler": self.filler, "value_digits": self.value_digits, "tokenizer": tokenizer}
        options = Options(pairs=self.pairs, questions=min(questions, self.pairs), **sizes)
        probe = PROBES[self.probe]
        return [probe.generate(rng_of("scale", SEED, self.name, i), "eval", options) for i in range(count)]


KINDS = (
    Kind("32 pairs", "kv_retrieval", 32, (0, 20)),
    Kind("64 pairs", "kv_retrieval", 64, (0, 20)),
    Kind("100 pairs", "kv_retrieval", 100, (0, 20)),
    Kind("32 pairs, far", "kv_retrieval", 32, (20, 60)),
    Kind("64 pairs, far", "kv_retrieval", 64, (20, 60)),
    Kind("32 pairs, 4 to 6 digits", "kv_retrieval", 32, (0, 20), (4, 6)),
    Kind("64 pairs, 4 to 6 digits", "kv_retrieval", 64, (0, 20), (4, 6)),
    Kind("24 records", "records", 24),
    Kind("24 records, 4 to 6 digits", "records", 24, None, (4, 6)),
    Kind("phonebook of 24", "phonebook", 24, None, (2, 6)),
)


class Answer(NamedTuple):
    """One answered question.

    Attributes:
        exact: the greedy text is the answer.
        first: its first token is the answer's.
        ranked: the answer's first token has the highest logit among those of the choices. It ranks values of one token.
    """

    exact: bool
    first: bool
    ranked: bool


class Asked(NamedTuple):
    """Tokens of a question with its answer, tokens before the answer, and the first token of each choice."""

    tokens: list[int]
    before: int
    choices: list[int]
    question: Question
    text: str


@dataclass(frozen=True)
class Context:
    """A context and its questions, in tokens."""

    document: Document
    tokenizer: PreTrainedTokenizerBase

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def text(self) -> str:
        """Text before the first question, which begins on the line of its answer."""
        before = self.document.text[: self.document.questions[0].answer[0]]
        return before[: before.rindex("\n") + 1]

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens of the context."""
        return self._tokens(self.text)

    @cached_property
    def asked(self) -> list[Asked]:
        """Every question directly after the context."""
        found, end = [], len(self.text)
        for question in self.document.questions:
            start, stop = question.answer
            asks = self.document.text[end:start].lstrip("\n")
            end = stop
            answer = self.document.text[start:stop]
            alone, whole = self._tokens(self.text + asks), self._tokens(self.text + asks + answer)
            n = len(self.prefix)
            if alone[:n] != self.prefix or whole[: len(alone)] != alone:
                raise ValueError(f"{self.document.task}: the tokenizer joins the context with {asks + answer!r}.")
            choices = [self._tokens(self.text[-1:] + asks + choice) for choice in question.choices]
            base = len(self._tokens(self.text[-1:] + asks))
            found.append(Asked(whole[n:], len(alone) - n, [c[base] for c in choices], question, answer))
        return found


@torch.no_grad()
def answers(model: PreTrainedModel, context: Context) -> list[Answer]:
    """Answer every question about one context, in order of the questions.

    Greedy text begins with the answer if and only if each of its tokens is the most likely one after those before it.
    So one pass over question and answer tells what generation would give (`surgery.data.generation`).
    """
    prefix = torch.tensor([context.prefix], device=model.device)
    cache = model(prefix, use_cache=True, logits_to_keep=1).cache
    order = sorted(range(len(context.asked)), key=lambda i: len(context.asked[i].tokens))
    found: dict[int, Answer] = {}
    for _, same in groupby(order, key=lambda i: len(context.asked[i].tokens)):
        indices = list(same)
        states = copy.deepcopy(cache)
        states.reorder_cache(torch.zeros(len(indices), dtype=torch.long, device=model.device))
        tokens = torch.tensor([context.asked[i].tokens for i in indices], device=model.device)
        logits_QTV = model(tokens, cache=states, use_cache=True).logits
        for index, logits_TV in zip(indices, logits_QTV, strict=True):
            found[index] = _judged(context.asked[index], logits_TV, context.tokenizer)
    return [found[i] for i in range(len(order))]


def _judged(asked: Asked, logits_TV: Tensor, tokenizer: PreTrainedTokenizerBase) -> Answer:
    likeliest, gold = logits_TV[asked.before - 1 :].argmax(-1).tolist(), asked.tokens[asked.before :]
    scores = logits_TV[asked.before - 1, asked.choices]
    text = str(tokenizer.decode(likeliest))
    exact = likeliest[:-1] == gold and is_match(text, [asked.text.strip()], bounded=True)
    return Answer(exact, likeliest[0] == gold[0], int(scores.argmax()) == asked.question.gold)


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[Kind], count: int, questions: int
) -> Iterator[tuple[Kind, list[list[Answer]]]]:
    """Answers of each kind, by context."""
    for kind in kinds:
        yield kind, [answers(model, Context(d, tokenizer)) for d in kind.documents(count, questions, tokenizer)]


def texts_of(path: Path, most: int) -> list[Document]:
    """The first texts of a JSONL file with the column `text`."""
    with path.open() as lines:
        return [Document("text", json.loads(line)["text"]) for line, _ in zip(lines, range(most), strict=False)]


def identity(count: int, questions: int) -> str:
    """Hash of the prompts' definition."""
    return fingerprint([SEED, [repr(kind) for kind in KINDS], count, questions])
