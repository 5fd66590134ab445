"""Turn documents with questions into token tensors.

Choices are told apart by their first tokens: by one token where all of them differ in it, else by the fewest that do.
Where one choice begins another (`7` and `71`, if a tokenizer cuts numbers into digits), the token that ends the value
in the context counts as its next token. The compared events therefore exclude one another.

Shape legend: B documents, T tokens, Q questions a document, K answer choices, C tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Span

Ids = tuple[int, ...]
_BEFORE = 2  # characters of the prompt that a choice is tokenized with: some tokenizers begin every text with a space


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
        choice_rest: (B, Q, K, C-1) the tokens after it that it takes to tell the choices apart; none by default.
        documents: (B, T) int32, where a row holds several documents: which of them a token belongs to, counted from 0;
            padding is one more. None where every document has its own row.
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
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        if self.choice_rest is None:
            object.__setattr__(self, "choice_rest", self.choice_ids[..., None][..., :0])

    @property
    def choice_tokens(self) -> Tensor:
        """(B, Q, K, C) the tokens by which each choice is scored, -1 behind the last."""
        return torch.cat([self.choice_ids[..., None], self.choice_rest], -1)

    def last_question(self) -> tuple[Tensor, Tensor]:
        """Of each row: (B,K,C) tokens of its last question's choices, and (B,) which of them is the answer."""
        last = (self.gold >= 0).sum(1).clamp(min=1) - 1
        rows = torch.arange(len(self), device=last.device)
        return self.choice_tokens[rows, last], self.gold[rows, last]

    @property
    def same_document(self) -> Tensor:
        """(B, T-1) bool: token t + 1 belongs to the document of token t."""
        real = self.attention_mask.bool()
        same = real[:, 1:] & real[:, :-1]
        return same if self.documents is None else same & (self.documents[:, 1:] == self.documents[:, :-1])

    def to(self, device: torch.device | str) -> EncodedBatch:
        return self._each(lambda tensor: tensor.to(device))

    def __getitem__(self, rows: slice | Tensor) -> EncodedBatch:
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> EncodedBatch:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return EncodedBatch(**{name: None if x is None else change(x) for name, x in fields.items()})

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def choice_tokens(tokens: Callable[[str], Ids], text: str, before: str = "") -> Ids:
    """The tokens of a choice as it stands after a prompt.

    Args:
        tokens: a tokenizer without special tokens.
        before: the last characters of the prompt.

    Raises:
        ProbeError: it has no token, or a token holds the prompt's last character and the choice's first.
    """
    prompt, whole = tokens(before), tokens(before + text)
    if whole[: len(prompt)] != prompt:
        hint = (
            f"A token holds its first character and the last of the prompt ({before!r}): move the space between them."
        )
        raise ProbeError("choice", repr(text), hint)
    if len(whole) == len(prompt):
        raise ProbeError("choice", repr(text), "It has no token.")
    return whole[len(prompt) :]


def told_apart(choices: Sequence[Ids], ends: Sequence[Ids]) -> list[Ids]:
    """As many first tokens of every choice as tell all of them apart, so that none begins another.

    Args:
        ends: for each choice the token that ends it, or nothing; looked at where their first tokens are not distinct.

    Raises:
        ProbeError: all their tokens do not.
    """
    if len({choice[0] for choice in choices}) == len(choices):
        return [choice[:1] for choice in choices]
    whole = [choice + end for choice, end in zip(choices, ends, strict=True)]
    for depth in range(2, max(map(len, whole)) + 1):
        cut = [choice[:depth] for choice in whole]
        if not any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(sorted(cut))):
            return cut
    raise ProbeError(
        "choices", f"{len(choices)} of them", "One has the tokens of another, or begins it and has no end."
    )


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
        ProbeError: a document has no question although `until_answer` is set, two choices of a question have the
            same tokens, or a token holds the prompt's last character and the answer's first.
    """
    rows = tokenizer([d.text for d in documents], add_special_tokens=False, return_offsets_mapping=True)
    lengths, parsed = [], []
    tokens = cache(lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    for document, ids, offsets in zip(documents, rows["input_ids"], rows["offset_mapping"], strict=True):
        questions = [_positions(q, document, ids, offsets, tokens) for q in document.questions]
        if until_answer and not questions:
            raise ProbeError("documents", document.task, "A document without a question cannot be probed.")
        lengths.append(questions[-1]["query"] + 1 if until_answer else len(ids))
        parsed.append(questions)
    B, T = len(documents), max(lengths)
    Q = max(1, max(len(p) for p in parsed))
    K = max([1] + [len(q["choices"]) for p in parsed for q in p])
    C = max([1] + [len(choice) for p in parsed for q in p for choice in q["choices"]])
    input_ids = torch.full((B, T), int(tokenizer.pad_token_id or 0))
    mask, answers = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.bool)
    columns = ("query", "target", "segment_start", "segment_end", "answer_token", "gold")
    fields = {name: torch.full((B, Q), -1) for name in columns}
    choices = torch.full((B, Q, K, C), -1)
    for b, (ids, questions, length) in enumerate(zip(rows["input_ids"], parsed, lengths, strict=True)):
        shift = T - length if padding_side == "left" else 0
        input_ids[b, shift : shift + length] = torch.tensor(ids[:length])
        mask[b, shift : shift + length] = 1
        for q, question in enumerate(questions):
            for name in columns:
                moved = shift if name not in ("target", "gold") and question[name] >= 0 else 0
                fields[name][b, q] = question[name] + moved
            if question["choices"]:
                padded = [(*choice, *[-1] * (C - len(choice))) for choice in question["choices"]]
                choices[b, q, : len(padded)] = torch.tensor(padded)
            first, last = question["answer"]
            answers[b, shift + first : min(shift + last + 1, shift + length)] = True
    return EncodedBatch(input_ids, mask, answers, choice_ids=choices[..., 0], choice_rest=choices[..., 1:], **fields)


def _positions(
    question: Question, document: Document, ids: list[int], offsets: Sequence[Span], tokens: Callable[[str], Ids]
) -> dict:
    """Token positions of one question. The answer's tokens are those of the whole text, never of a piece of it."""
    first = _token_at(offsets, question.answer[0], first=True)
    if offsets[first][0] < question.answer[0]:
        held = document.text[slice(*offsets[first])]
        hint = "A token holds its first character and the last of the prompt."
        raise ProbeError(f"{document.task} answer", repr(held), hint)
    last = _token_at(offsets, question.answer[1] - 1)
    value, segment = question.value, question.segment
    return {
        "query": first - 1,
        "target": ids[first],
        "answer": (first, last),
        "segment_start": _token_at(offsets, segment[0], first=True) if segment else -1,
        "segment_end": _token_at(offsets, segment[1] - 1) if segment else -1,
        "answer_token": _token_at(offsets, value[0], first=True) if value else -1,
        "gold": question.gold,
        "choices": _choices(question, document, tuple(ids[first : last + 1]), tokens),
    }


def _choices(question: Question, document: Document, answer: Ids, tokens: Callable[[str], Ids]) -> list[Ids]:
    """The tokens by which the question's choices are scored; the gold one's are the answer's own."""
    if not question.choices:
        return []
    before = document.text[max(0, question.answer[0] - _BEFORE) : question.answer[0]]
    choices = [choice_tokens(tokens, text, before) for text in question.choices]
    choices[question.gold] = answer
    ends: list[Ids] = [()] * len(choices)
    if question.value and question.segment and len({choice[0] for choice in choices}) < len(choices):
        end = document.text[question.value[1] : question.segment[1]]
        ends = [_next(tokens(before + text), tokens(before + text + end)) for text in question.choices]
    try:
        return told_apart(choices, ends)
    except ProbeError as error:
        raise ProbeError(f"{document.task} choices", list(question.choices)[:8], error.hint) from None


def _next(shorter: Ids, longer: Ids) -> Ids:
    """The token of `longer` after those of `shorter`, if it goes on from there."""
    return longer[len(shorter) : len(shorter) + 1] if longer[: len(shorter)] == shorter else ()
