"""Turn documents with questions into token tensors.

A choice is scored by as many of its first tokens as distinguish all choices, usually one. If one choice is a prefix of
another (`7` and `71`, with a token per digit), the token that follows the value in the context is appended to it. So
the compared events are mutually exclusive.

Shape legend: B documents, T tokens, Q questions a document, R reads a document (one for each answer token), K answer
choices, C tokens of a choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surgery.data.offsets import tokenized
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Span

Ids = tuple[int, ...]
_READS = ("read_query", "read_segment_end", "read_answer_token")
_BEFORE = 2  # characters of the prompt to tokenize before a choice: some tokenizers start every text with a space


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
    - `read_segment_end`: the segment's last token for every i. A Gather head writes key and value there. No token
      before it can hold both the whole value and the key that the query looks for.

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


def choice_tokens(tokens: Callable[[str], Ids], text: str, before: str = "") -> Ids:
    """Tokenize a choice as it follows a prompt.

    Args:
        tokens: function from a text to its token ids, without special tokens.
        text: the choice.
        before: last characters of the prompt.

    Raises:
        ProbeError: the choice has no token, or a token spans the end of the prompt and the start of the choice.
    """
    prompt, whole = tokens(before), tokens(before + text)
    if whole[: len(prompt)] != prompt:
        hint = (
            f"One token covers the end of the prompt ({before!r}) and the start of the choice. Move the space between "
            "them."
        )
        raise ProbeError("choice", repr(text), hint)
    if len(whole) == len(prompt):
        raise ProbeError("choice", repr(text), "It has no token. Use another text.")
    return whole[len(prompt) :]


def distinct_prefixes(choices: Sequence[Ids], ends: Sequence[Ids]) -> list[Ids]:
    """Shorten every choice to its first tokens, as few as keep all choices distinct and none a prefix of another.

    Args:
        choices: tokens of each choice.
        ends: for each choice the token that follows it, or nothing. Used if the first tokens are not distinct.

    Raises:
        ProbeError: two choices have the same tokens.
    """
    if len({choice[0] for choice in choices}) == len(choices):
        return [choice[:1] for choice in choices]
    whole = [choice + end for choice, end in zip(choices, ends, strict=True)]
    for depth in range(2, max(map(len, whole)) + 1):
        cut = [choice[:depth] for choice in whole]
        if not any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(sorted(cut))):
            return cut
    raise ProbeError(
        "choices",
        f"{len(choices)} choices",
        "Two have the same tokens, or one is a prefix of another and no token follows it. Use other texts.",
    )


def _token_at(offsets: Sequence[Span], char: int, first: bool = False) -> int:
    """Find the last (or first) token that covers a character. Several tokens do if its bytes are split."""
    covering = [i for i, (start, end) in enumerate(offsets) if start <= char < end]
    if not covering:
        raise ProbeError("tokenizer", f"no token covers character {char}", "The tokenizer drops text. Use another one.")
    return covering[0 if first else -1]


def encode(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    padding_side: Literal["left", "right"] = "right",
    until_answer: bool = False,
) -> EncodedBatch:
    """Tokenize documents, and find every position by the tokenizer's offsets.

    Args:
        padding_side: side on which rows are padded to the longest.
        until_answer: cut each document before the answer of its last question, so that the last token of every row is
            a query. With `padding_side="left"` it is in the last column. Of the last answer, only the first token has a
            read.

    Returns:
        A batch on the CPU.

    Raises:
        ProbeError: `until_answer` is set and a document has no question, two choices have the same tokens, or a token
            spans the end of the prompt and the start of the answer.
    """
    rows = tokenized(tokenizer, [document.text for document in documents])
    lengths, parsed = [], []
    tokens = cache(lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    for document, (ids, offsets) in zip(documents, rows, strict=True):
        questions = [_positions(q, document, ids, offsets, tokens, tokenizer.eos_token_id) for q in document.questions]
        if until_answer and not questions:
            raise ProbeError(
                "documents", document.task, "It has a document without a question, which cannot be scored."
            )
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
    reads = [
        [read for question in questions for read in question["reads"] if read[0] < length]
        for questions, length in zip(parsed, lengths, strict=True)
    ]
    R = max(1, max(map(len, reads)))
    for name in _READS:
        fields[name] = torch.full((B, R), -1)
    choices = torch.full((B, Q, K, C), -1)
    for b, ((ids, _), questions, length) in enumerate(zip(rows, parsed, lengths, strict=True)):
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
        for r, read in enumerate(reads[b]):
            for name, place in zip(_READS, read, strict=True):
                fields[name][b, r] = place + shift if place >= 0 else -1
    return EncodedBatch(input_ids, mask, answers, choice_ids=choices[..., 0], choice_rest=choices[..., 1:], **fields)


def _positions(
    question: Question,
    document: Document,
    ids: list[int],
    offsets: Sequence[Span],
    tokens: Callable[[str], Ids],
    end: int | None,
) -> dict:
    """Find the token positions of one question in the tokens of the whole text."""
    first = _token_at(offsets, question.answer[0], first=True)
    if offsets[first][0] < question.answer[0]:
        token = document.text[slice(*offsets[first])]
        hint = "This token covers the end of the prompt and the start of the answer. Move the space between them."
        raise ProbeError(f"{document.task} answer", repr(token), hint)
    last = _token_at(offsets, question.answer[1] - 1)
    value, segment = question.value, question.segment
    segment_end = _token_at(offsets, segment[1] - 1) if segment else -1
    content = question.answer[0], offsets[last][0] if first < last and ids[last] == end else question.answer[1]
    held = _held(document.text, content, value if segment else None, offsets, range(first, last + 1))
    return {
        "query": first - 1,
        "target": ids[first],
        "answer": (first, last),
        "segment_start": _token_at(offsets, segment[0], first=True) if segment else -1,
        "segment_end": segment_end,
        "answer_token": _token_at(offsets, value[0], first=True) if value else -1,
        "reads": [(token - 1, segment_end if place >= 0 else -1, place) for token, place in held if token],
        "gold": question.gold,
        "choices": _choices(question, document, tuple(ids[first : last + 1]), tokens),
    }


def _held(
    text: str, answer: Span, value: Span | None, offsets: Sequence[Span], tokens: Sequence[int]
) -> list[tuple[int, int]]:
    """Find the token of the value that holds each token of an answer. `EncodedBatch` has the rule.

    Args:
        answer: characters of the answer, without an end token.
        value: characters of the value; None if there is none.
        tokens: indices of the answer's tokens.

    Returns:
        (token of the answer, token of the value or -1), without tokens of whitespace around the answer.
    """
    start, stop = _stripped(text, answer)
    holders: dict[int, list[int]] = defaultdict(list)  # character of the answer -> tokens of the value
    if value is not None:
        first = _token_at(offsets, value[0], first=True)
        value_start, value_stop = _stripped(text, value)
        if text[start:stop].startswith(text[value_start:value_stop]):
            for i in takewhile(lambda i: offsets[i][0] < value_stop, range(first, len(offsets))):
                for char in range(offsets[i][0], min(offsets[i][1], value_stop)):
                    holders[char - value_start + start].append(i)
        holders[start] = holders[start] or [first]
    found = []
    for token in tokens:
        if offsets[token][1] <= start:
            continue
        begin = max(offsets[token][0], start)
        if begin >= stop:
            break
        held_by = holders.get(begin, [])
        order = 0  # of the token among those that share this character
        while token - order > tokens[0] and offsets[token - order - 1][1] > begin:
            order += 1
        found.append((token, held_by[min(order, len(held_by) - 1)] if held_by else -1))
    if value is not None and found and found[0][0] == tokens[0]:
        found[0] = tokens[0], first
    return found


def _stripped(text: str, span: Span) -> Span:
    """Return the span without whitespace at its ends, or all of it if there is nothing else."""
    content = text[slice(*span)].strip()
    start = span[0] + text[slice(*span)].index(content)
    return (start, start + len(content)) if content else span


def _choices(question: Question, document: Document, answer: Ids, tokens: Callable[[str], Ids]) -> list[Ids]:
    """Return the tokens that each choice is scored by. The gold choice has the tokens of the answer in the text."""
    if not question.choices:
        return []
    before = document.text[max(0, question.answer[0] - _BEFORE) : question.answer[0]]
    choices = [choice_tokens(tokens, text, before) for text in question.choices]
    choices[question.gold] = answer
    ends: list[Ids] = [()] * len(choices)
    if question.value and question.segment and len({choice[0] for choice in choices}) < len(choices):
        end = document.text[question.value[1] : question.segment[1]]
        for k, text in enumerate(question.choices):
            shorter, longer = tokens(before + text), tokens(before + text + end)
            if longer[: len(shorter)] == shorter:
                ends[k] = longer[len(shorter) : len(shorter) + 1]
    try:
        return distinct_prefixes(choices, ends)
    except ProbeError as error:
        raise ProbeError(f"{document.task} choices", list(question.choices)[:8], error.hint) from None
