"""Find the tokens of questions, answers and values by the characters that they cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from surgery.data.choices import Ids, scored_by
from surgery.data.offsets import Tokens, tokenized
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Span


class Positions(NamedTuple):
    """Token positions of one question, with the names of `EncodedBatch`. The value -1 is a position without a token.

    Attributes:
        answer: first and last token of the answer.
        reads: (query, place at the segment's end, token of the value) of each token of the answer.
        choices: tokens that each choice is scored by.
    """

    query: int
    target: int
    segment_start: int
    segment_end: int
    answer_token: int
    gold: int
    answer: Span
    reads: Sequence[tuple[int, int, int]]
    choices: Sequence[Ids]


class EncodedDocument(NamedTuple):
    """Token ids of a document, and the positions of its questions."""

    task: str
    ids: Sequence[int]
    questions: Sequence[Positions]


def encode_each(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, choices: bool = True
) -> list[EncodedDocument]:
    """Tokenize documents in one call, and find every position by the tokenizer's offsets.

    Args:
        choices: also tokenize the choices of each question, which takes longer than the rest.

    Raises:
        ProbeError: two choices have the same tokens, or a token spans the end of the prompt and the start of the
            answer.
    """
    of_choice: Callable[[str], Ids] | None = None
    if choices:
        of_choice = cache(lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    end, encoded = tokenizer.eos_token_id, []
    for document, tokens in zip(documents, tokenized(tokenizer, [d.text for d in documents]), strict=True):
        questions = [positions_of(question, document, tokens, end, of_choice) for question in document.questions]
        encoded.append(EncodedDocument(document.task, tokens.ids, questions))
    return encoded


def _covering(tokens: Tokens, char: int) -> range:
    found = tokens.covering(char)
    if not found:
        raise ProbeError(
            "tokenizer", f"no token covers character {char}", "This tokenizer drops text. Use another one."
        )
    return found


def positions_of(
    question: Question,
    document: Document,
    tokens: Tokens,
    end: int | None = None,
    of_choice: Callable[[str], Ids] | None = None,
) -> Positions:
    """Find the token positions of one question.

    Args:
        tokens: of the document.
        end: the end token, which is no part of an answer.
        of_choice: function from a choice to its tokens; without it choices are left out.

    Raises:
        ProbeError: as `encode_each`.
    """
    (start, stop), value, segment = question.answer, question.value, question.segment
    first, last = _covering(tokens, start)[0], _covering(tokens, stop - 1)[-1]
    if tokens.starts[first] < start:
        token = document.text[tokens.starts[first] : tokens.ends[first]]
        problem = f"the token {token!r} spans the end of the prompt and the start of the answer"
        hint = "Move the space between them, or end the prompt with a newline."
        raise ProbeError(document.task, problem, hint)
    segment_end = _covering(tokens, segment[1] - 1)[-1] if segment else -1
    if first < last and tokens.ids[last] == end:
        stop = tokens.starts[last]
    held = _held(document.text, (start, stop), value if segment else None, tokens, range(first, last + 1))
    last_held = max((at for _, at in held), default=-1)
    key_follows = bool(value and segment and value[0] == segment[0])  # nothing of the segment stands before the value
    shift = segment_end - last_held if key_follows else 1  # from a token of the value to its place at the segment's end
    return Positions(
        query=first - 1,
        target=tokens.ids[first],
        segment_start=_covering(tokens, segment[0])[0] if segment else -1,
        segment_end=segment_end,
        answer_token=_covering(tokens, value[0])[0] if value else -1,
        gold=question.gold,
        answer=(first, last),
        reads=[(token - 1, min(at + shift, segment_end) if at >= 0 else -1, at) for token, at in held if token],
        choices=scored_by(question, document, tuple(tokens.ids[first : last + 1]), of_choice) if of_choice else (),
    )


def _held(
    text: str, answer: Span, value: Span | None, tokens: Tokens, answer_tokens: Sequence[int]
) -> list[tuple[int, int]]:
    """Find the token of the value that holds each token of an answer. `EncodedBatch` has the rule.

    Args:
        answer, value: characters of the answer without an end token, and of the value.

    Returns:
        (token of the answer, token of the value or -1), without tokens of whitespace around the answer.
    """
    start, stop = _stripped(text, answer)
    first, shift, value_stop = -1, 0, 0  # `shift`: from a character of the answer to the same one of the value
    if value is not None:
        first = _covering(tokens, value[0])[0]
        value_start, value_end = _stripped(text, value)
        if text.startswith(text[value_start:value_end], start, stop):
            shift, value_stop = value_start - start, value_end
    found = []
    for token in answer_tokens:
        if tokens.ends[token] <= start:
            continue
        begin = max(tokens.starts[token], start)
        if begin >= stop:
            break
        holders: Sequence[int] = tokens.covering(begin + shift) if begin + shift < value_stop else ()
        order = 0  # of the token among those that share this character
        while token - order > answer_tokens[0] and tokens.ends[token - order - 1] > begin:
            order += 1
        otherwise = first if begin == start else -1
        found.append((token, holders[min(order, len(holders) - 1)] if holders else otherwise))
    if found and found[0][0] == answer_tokens[0] and value is not None:
        found[0] = answer_tokens[0], first
    return found


def _stripped(text: str, span: Span) -> Span:
    """Return the span without whitespace at its ends, or all of it if there is nothing else."""
    content = text[slice(*span)].strip()
    start = span[0] + text[slice(*span)].index(content)
    return (start, start + len(content)) if content else span
