"""Documents, questions, and the one way from text to tensors. Owns: spans, encoding, the train/eval split.

Must never know: models, training. Every generator of this package returns `Document`s; every consumer
(pretraining, locating, training, evaluation) turns them into an `EncodedBatch` here.

Shape legend: B documents, T tokens, Q questions a document, K answer choices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import ProbeError

Split = Literal["train", "eval"]
Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """One answer in a document, as character spans [start, end) of its text.

    Attributes:
        answer: the answer itself; the token before it is the query.
        choices: texts that compete with the answer, the answer among them.
        gold: index of the answer in `choices`.
        segment: the context segment that holds the answer (`key:value\\n`); None when nothing is to be retrieved.
        value: the answer's own place inside that segment.
    """

    answer: Span
    choices: tuple[str, ...]
    gold: int
    segment: Span | None = None
    value: Span | None = None


@dataclass(frozen=True)
class Document:
    """A text, the task it belongs to, and the questions in it (none for plain text)."""

    task: str
    text: str
    questions: tuple[Question, ...] = ()


class Writer:
    """Appends text and remembers spans, so that no position is ever counted by hand."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> Span:
        start = len(self.text)
        self.text += piece
        return start, len(self.text)


def split_of(text: str, eval_share: int = 10) -> Split:
    """`eval` for one text in `eval_share`, by its hash: the two splits are disjoint whatever generated them."""
    return "eval" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % eval_share == 0 else "train"


def draw(split: Split, make: Callable[[], str]) -> str:
    """Draws texts from `make` until one falls into `split`. Raises ProbeError if a thousand do not."""
    for _ in range(1000):
        text = make()
        if split_of(text) == split:
            return text
    raise ProbeError("split", split, "This generator makes too few different texts for both splits.")


def rng_of(*key: object) -> Random:
    """A generator that depends on `key` alone, whatever process or order it is asked in."""
    return Random(":".join(map(str, key)))


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as tensors. Positions index T; -1 pads Q and K and marks a position that does not exist.

    Attributes:
        input_ids, attention_mask: (B, T).
        answers: (B, T) bool, True on tokens of an answer.
        query: (B, Q) the token that must predict the answer's first token.
        target: (B, Q) id of the answer's first token.
        segment_end, answer_token: (B, Q) where a Gather head has put the segment; where the value itself stands.
        segment_start: (B, Q) first token of the gold segment.
        choice_ids: (B, Q, K) first token of each choice; `gold` (B, Q) indexes it.
    """

    input_ids: Tensor
    attention_mask: Tensor
    answers: Tensor
    query: Tensor
    target: Tensor
    segment_start: Tensor
    segment_end: Tensor
    answer_token: Tensor
    choice_ids: Tensor
    gold: Tensor

    def to(self, device: torch.device | str) -> EncodedBatch:
        return EncodedBatch(**{k: getattr(self, k).to(device) for k in self.__dataclass_fields__})

    def __getitem__(self, rows: slice) -> EncodedBatch:
        return EncodedBatch(**{k: getattr(self, k)[rows] for k in self.__dataclass_fields__})

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def choice_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The first token of a choice as it stands after a prompt."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ProbeError("choice", repr(text), "It has no token.")
    return int(ids[0])


def _token_at(offsets: Sequence[Span], char: int, first: bool = False) -> int:
    """Index of the token that covers character `char`: the last one, or the first, where its bytes are split."""
    found = [i for i, (start, end) in enumerate(offsets) if start <= char < end]
    if not found:
        raise ProbeError("tokenizer", f"no token covers character {char}", "It drops text; probes need all of it.")
    return found[0 if first else -1]


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    padding_side: Literal["left", "right"] = "right",
    until_answer: bool = False,
) -> EncodedBatch:
    """Tokenizes documents whole and finds every position from the tokenizer's own offsets.

    Args:
        until_answer: cut each document before the answer of its last question, so that the last token of every
            row is a query; what probing needs. With `padding_side="left"` it stands in the last column.

    Returns:
        An `EncodedBatch` on the CPU.

    Raises:
        ProbeError: a document has no question although `until_answer` is set, or two choices of a question
            start with the same token, so that one step cannot tell them apart.
    """
    rows = tokenizer([d.text for d in documents], add_special_tokens=False, return_offsets_mapping=True)
    lengths, parsed = [], []
    choice_cache: dict[str, int] = {}
    for document, ids, offsets in zip(documents, rows["input_ids"], rows["offset_mapping"], strict=True):
        questions = [_positions(q, document, ids, offsets, tokenizer, choice_cache) for q in document.questions]
        if until_answer and not questions:
            raise ProbeError("documents", document.task, "A document without a question cannot be probed.")
        lengths.append(questions[-1]["query"] + 1 if until_answer else len(ids))
        parsed.append(questions)
    B, T = len(documents), max(lengths)
    Q = max(1, max(len(p) for p in parsed))
    K = max([1] + [len(q["choices"]) for p in parsed for q in p])
    input_ids = torch.full((B, T), int(tokenizer.pad_token_id or 0))
    mask, answers = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.bool)
    columns = ("query", "target", "segment_start", "segment_end", "answer_token", "gold")
    fields = {name: torch.full((B, Q), -1) for name in columns}
    choice_ids = torch.full((B, Q, K), -1)
    for b, (ids, questions, length) in enumerate(zip(rows["input_ids"], parsed, lengths, strict=True)):
        shift = T - length if padding_side == "left" else 0
        input_ids[b, shift : shift + length] = torch.tensor(ids[:length])
        mask[b, shift : shift + length] = 1
        for q, question in enumerate(questions):
            for name in columns:
                moved = shift if name not in ("target", "gold") and question[name] >= 0 else 0
                fields[name][b, q] = question[name] + moved
            choice_ids[b, q, : len(question["choices"])] = torch.tensor(question["choices"])
            first, last = question["answer"]
            answers[b, shift + first : min(shift + last + 1, shift + length)] = True
    return EncodedBatch(input_ids, mask, answers, choice_ids=choice_ids, **fields)


def _positions(
    question: Question,
    document: Document,
    ids: list[int],
    offsets: Sequence[Span],
    tokenizer: PreTrainedTokenizerBase,
    cache: dict[str, int],
) -> dict:
    """Token positions of one question. The answer's tokens are those of the whole text, never of a piece of it."""
    first = _token_at(offsets, question.answer[0], first=True)
    for text in question.choices:
        if text not in cache:
            cache[text] = choice_token(tokenizer, text)
    choices = [cache[c] for c in question.choices]
    if choices:
        choices[question.gold] = ids[first]
        if len(set(choices)) < len(choices):
            raise ProbeError(
                f"{document.task} choices",
                list(question.choices)[:8],
                "Two of them start with the same token of this tokenizer, so one step cannot tell them apart.",
            )
    value, segment = question.value, question.segment
    return {
        "query": first - 1,
        "target": ids[first],
        "answer": (first, _token_at(offsets, question.answer[1] - 1)),
        "segment_start": _token_at(offsets, segment[0], first=True) if segment else -1,
        "segment_end": _token_at(offsets, segment[1] - 1) if segment else -1,
        "answer_token": _token_at(offsets, value[0], first=True) if value else -1,
        "gold": question.gold,
        "choices": choices,
    }
