"""Turn documents with questions into token tensors.

Shape legend: B documents, T tokens, Q questions a document, R reads a document (one for each answer token), K answer
choices, C tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.data.positions import Positions, encode_each
from surgery.errors import ProbeError
from surgery.probes.documents import Document
from surgery.types import Reads

Side = Literal["left", "right"]
_QUESTION = ("query", "target", "segment_start", "segment_end", "answer_token", "gold")  # the first fields of Positions
_READ = ("read_query", "read_segment_end", "read_answer_token")
_VALUES = ("target", "gold")  # not indices into T


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as tensors. Positions index T. The value -1 is padding, or a position that does not exist.

    `query` to `answer_token` and the choices describe the first token of each answer: heads are located and choices are
    ranked there. The reads describe every token of every answer, for training. They follow the order of the questions.
    An end token, and tokens of whitespace around an answer, have no read. If all answers have one token, the reads are
    the questions.

    The gold positions of the read of answer token i:

    - `read_answer_token`: the token of the value that holds it. Answer and value are aligned by characters, without
      whitespace at their ends, since a text may have other tokens in another place (` 51`, `2` and `5`, `12`). A token
      that begins inside another one of the value is held by that one. Tokens that share a character (its bytes are
      split) correspond in their order. An answer's first token is held by the value's first, where heads are located.
    - `read_segment_end`: the token after that one, or the segment's last if there is none. A copied head reads there
      before any training (paper/SCALE.md). If the segment begins with the value, its key follows, and a Gather head has
      both at the segment's end: then it is the segment's last token for the last token of the value, and for those
      before it as many tokens before that.

    Both are -1 if no token of the value holds answer token i: the answer continues after the text of the value, or
    begins with another text. Then only its first token has gold positions.

    Attributes:
        input_ids, attention_mask: (B, T).
        answers: (B, T) bool, True on tokens of an answer.
        query: (B, Q) the token that must predict the answer's first token.
        target: (B, Q) id of the answer's first token.
        segment_start, segment_end: (B, Q) first and last token of the gold segment. A Gather head writes to the last.
        answer_token: (B, Q) first token of the value in the segment.
        read_query: (B, R) the token that must predict each answer token.
        read_segment_end, read_answer_token: (B, R) gold positions of each read. By default those of the questions.
        choice_ids: (B, Q, K) first token of each choice; `gold` (B, Q) indexes it.
        choice_rest: (B, Q, K, C-1) later tokens that distinguish the choices; none by default.
        documents: (B, T) int32, for rows that hold several documents: index of each token's document, from 0. Padding
            has the next index. None if every document has its own row.
        sources: (B, T) index of the training source of each token. None for documents of one source.
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
    choice_rest: Tensor = None  # type: ignore[assignment]
    read_query: Tensor = None  # type: ignore[assignment]
    read_segment_end: Tensor = None  # type: ignore[assignment]
    read_answer_token: Tensor = None  # type: ignore[assignment]
    documents: Tensor | None = None
    sources: Tensor | None = None

    def __post_init__(self) -> None:
        if self.choice_rest is None:
            object.__setattr__(self, "choice_rest", self.choice_ids[..., None][..., :0])
        if self.read_query is None:
            for name in ("query", "segment_end", "answer_token"):
                object.__setattr__(self, f"read_{name}", getattr(self, name))

    @property
    def choice_tokens(self) -> Tensor:
        """(B, Q, K, C) tokens by which each choice is scored, -1 after the last."""
        return torch.cat([self.choice_ids[..., None], self.choice_rest], -1)

    def last_question(self) -> tuple[Tensor, Tensor]:
        """(B,K,C) tokens of the choices of each row's last question, and (B,) the index of the answer."""
        return self.of_last_question(self.choice_tokens), self.of_last_question(self.gold)

    def last_read(self, reads: Reads) -> Tensor:
        """(B,) the gold position of the first token of each row's last answer; -1 if there is none."""
        is_last_BR = self.read_query == self.of_last_question(self.query)[:, None]
        gold_BR = getattr(self, f"read_{reads}").masked_fill(~is_last_BR, -1)
        return gold_BR.max(1).values

    def of_last_question(self, values_BQ: Tensor) -> Tensor:
        """(B,Q,...) -> (B,...), the entry of each row's last question."""
        last_B = (self.gold >= 0).sum(1).clamp(min=1) - 1
        return values_BQ[torch.arange(len(self), device=last_B.device), last_B]

    @property
    def same_document(self) -> Tensor:
        """(B, T-1) bool, True if tokens t and t + 1 belong to the same document."""
        real = self.attention_mask.bool()
        same = real[:, 1:] & real[:, :-1]
        return same if self.documents is None else same & (self.documents[:, 1:] == self.documents[:, :-1])

    def to(self, device: torch.device | str) -> EncodedBatch:
        """Copy to a device; from page-locked memory without waiting for it."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> EncodedBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def __getitem__(self, rows: slice | Tensor) -> EncodedBatch:
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> EncodedBatch:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return EncodedBatch(**{name: None if x is None else change(x) for name, x in fields.items()})

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    padding_side: Side = "right",
    until_answer: bool = False,
    choices: bool = True,
) -> EncodedBatch:
    """Tokenize documents, and find every position by the tokenizer's offsets.

    Args:
        padding_side: side on which rows are padded to the longest.
        until_answer: cut each document before the answer of its last question, so that the last token of every row is
            a query. With `padding_side="left"` it is in the last column. Of the last answer, only the first token has a
            read.
        choices: also tokenize the choices. Without them, which is faster, questions are as if they had none.

    Returns:
        A batch on the CPU, one document a row.

    Raises:
        ProbeError: `until_answer` is set and a document has no question, two choices have the same tokens, or a token
            spans the end of the prompt and the start of the answer.
    """
    encoded = encode_each(documents, tokenizer, choices)
    for document in encoded:
        if until_answer and not document.questions:
            hint = "It has a document without a question, which cannot be scored."
            raise ProbeError("documents", document.task, hint)
    lengths = [d.questions[-1].query + 1 if until_answer else len(d.ids) for d in encoded]
    B, T = len(encoded), max(lengths)
    shifts = [T - length if padding_side == "left" else 0 for length in lengths]
    mask_BT, answers_BT = np.zeros((B, T), np.int64), np.zeros((B, T), np.bool_)
    for row, (document, shift, length) in enumerate(zip(encoded, shifts, lengths, strict=True)):
        mask_BT[row, shift : shift + length] = 1
        for question in document.questions:
            first, last = question.answer
            answers_BT[row, shift + first : min(shift + last + 1, shift + length)] = True
    ids_BT = np.full((B, T), int(tokenizer.pad_token_id or 0))
    ids = chain.from_iterable(d.ids[:length] for d, length in zip(encoded, lengths, strict=True))
    ids_BT[mask_BT.astype(np.bool_)] = np.fromiter(ids, np.int64, sum(lengths))
    questions = _columns(_QUESTION, [[q[: len(_QUESTION)] for q in d.questions] for d in encoded], shifts)
    reads = [[r for q in d.questions for r in q.reads if r[0] < end] for d, end in zip(encoded, lengths, strict=True)]
    arrays = {"input_ids": ids_BT, "attention_mask": mask_BT, "answers": answers_BT}
    arrays |= questions | _columns(_READ, reads, shifts)
    choices_BQKC = torch.from_numpy(_choices([d.questions for d in encoded]))
    return EncodedBatch(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        choice_ids=choices_BQKC[..., 0],
        choice_rest=choices_BQKC[..., 1:],
    )


def _columns(
    names: Sequence[str], entries: Sequence[Sequence[Sequence[Any]]], shifts: Sequence[int]
) -> dict[str, np.ndarray]:
    """Put the entries of each row into arrays by name, (B, most entries of a row), padded by -1.

    Args:
        entries: of each row, one number for each name.
        shifts: of each row, what is added to indices.
    """
    counts_B = np.array([len(row) for row in entries])
    table_nBQ = np.full((len(names), len(entries), max(1, counts_B.max())), -1)
    values_Nn = np.array([entry for row in entries for entry in row], np.int64).reshape(-1, len(names))
    moved = (values_Nn >= 0) & np.array([name not in _VALUES for name in names])
    values_Nn += moved * np.repeat(shifts, counts_B)[:, None]
    table_nBQ[:, np.arange(table_nBQ.shape[-1]) < counts_B[:, None]] = values_Nn.T
    return dict(zip(names, table_nBQ, strict=True))


def _choices(questions: Sequence[Sequence[Positions]]) -> np.ndarray:
    """Put the tokens of all choices into an array (B,Q,K,C), padded by -1."""
    Q = max(1, *map(len, questions))
    K = max([1] + [len(question.choices) for row in questions for question in row])
    C = max([1] + [len(choice) for row in questions for question in row for choice in question.choices])
    choices_BQKC = np.full((len(questions), Q, K, C), -1)
    for b, row in enumerate(questions):
        for q, question in enumerate(row):
            for k, choice in enumerate(question.choices):
                choices_BQKC[b, q, k, : len(choice)] = choice
    return choices_BQKC
