"""Documents as they are encoded: whole, or the pieces of a plain text that is too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from surgery.errors import DataError, short_repr
from surgery.probes.documents import Document, Span

_CUT_TRIES = 32  # token boundaries to try for a cut that leaves the tokens unchanged
_AFTER_CUT = 8  # tokens after a cut to compare with those of the whole text


class Piece(NamedTuple):
    """A document, or a piece of a long text.

    Attributes:
        row: index of its row, from 0.
        span: its characters [start, end) in the text of the row.
        tokens: number of tokens.
    """

    document: Document
    row: int
    span: Span
    tokens: int


def part(document: Document, span: Span) -> Document:
    """Return the characters `span` of a plain text as a document, or the document itself if that is all of it."""
    whole = span == (0, len(document.text))
    return document if whole else Document(document.task, document.text[slice(*span)])


def cut(
    text: str, ids: Sequence[int], offsets: Sequence[Span], limit: int, tokens: Callable[[str], list[int]]
) -> list[tuple[Span, int]]:
    """Cut a text into pieces of at most `limit` tokens.

    A cut is at the last token boundary before the limit at which the pieces have the tokens of the whole text. If there
    is none (some tokenizers start every text with a space), the piece is as long as possible and has other tokens.

    Args:
        ids, offsets: token ids and character offsets of the whole text.
        limit: maximum tokens of a piece.
        tokens: function from a text to its token ids.

    Returns:
        (characters [start, end), number of tokens) of every piece.

    Raises:
        DataError: `limit` is too small for any piece.
    """
    pieces: list[tuple[Span, int]] = []
    start, at = 0, 0  # token, character
    while start < len(ids):
        best: tuple[int, int, int] | None = None
        ends = (
            end
            for end in range(min(start + limit, len(ids)), start, -1)
            if end == len(offsets) or offsets[end - 1][1] <= offsets[end][0]  # the two tokens share no character
        )
        for end in islice(ends, _CUT_TRIES):
            stop = offsets[end][0] if end < len(ids) else len(text)
            piece = tokens(text[at:stop])
            after = text[stop : offsets[min(end + _AFTER_CUT, len(ids)) - 1][1]]
            if piece == list(ids[start:end]) and tokens(after)[:1] == list(ids[end : end + 1]):
                best = (end, stop, len(piece))
                break
            if best is None and len(piece) <= limit:
                best = (end, stop, len(piece))
        if best is None:
            hint = f"Too small to cut {short_repr(text[at:])} between its tokens. Increase it."
            raise DataError("max_tokens", limit, hint)
        pieces.append(((at, best[1]), best[2]))
        start, at = best[:2]
    return pieces
