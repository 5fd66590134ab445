"""Tokens by which the choices of a question are scored.

A choice is scored by as many of its first tokens as distinguish all choices, usually one. If one choice is a prefix of
another (`7` and `71`, with a token per digit), the token that follows the value in the context is appended to it. So
the compared events are mutually exclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question

Ids = tuple[int, ...]


def scored_by(question: Question, document: Document, answer: Ids, tokens: Callable[[str], Ids]) -> list[Ids]:
    """Return the tokens that each choice is scored by. The gold choice has the tokens of the answer in the text.

    Args:
        answer: tokens of the answer.
        tokens: function from a text to its token ids, without special tokens.

    Raises:
        ProbeError: two choices cannot be told apart, or a choice has no token of its own.
    """
    if not question.choices:
        return []
    # With the two characters before it: some tokenizers start every text with a space.
    before = document.text[max(0, question.answer[0] - 2) : question.answer[0]]
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


def choice_tokens(tokens: Callable[[str], Ids], text: str, before: str = "") -> Ids:
    """Tokenize a choice as it follows the last characters of a prompt, `before`.

    Raises:
        ProbeError: the choice has no token, or a token spans the end of the prompt and the start of the choice.
    """
    prompt, whole = tokens(before), tokens(before + text)
    if whole[: len(prompt)] != prompt:
        hint = f"One token covers the end of the prompt ({before!r}) and the start of the choice. Move the space "
        raise ProbeError("choice", repr(text), hint + "between them.")
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
    hint = "Two have the same tokens, or one is a prefix of another and no token follows it. Use other texts."
    raise ProbeError("choices", f"{len(choices)} choices", hint)
