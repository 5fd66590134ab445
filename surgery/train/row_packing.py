"""Several documents a row. Owns: which documents share one, and where their positions go.

Must never know: models. Rows are no longer than the longest document, so whatever grows with the length of a row stays
as large as it was; only their number falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.data.encoding import EncodedBatch

_TOKENS = ("input_ids", "attention_mask", "answers")
_PLACES = ("query", "segment_start", "segment_end", "answer_token")  # they index T
_VALUES = ("target", "gold", "choice_ids", "choice_rest")


def first_fit(lengths: Sequence[int]) -> list[list[int]]:
    """Which documents share a row: the longest first, each into the first row that has room. At most 11/9 of the fewest
    rows that would do, and two thirds of a row (Dosa, 2007).
    """
    most, rows, room = max(lengths, default=0), list[list[int]](), list[int]()
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((i for i, left in enumerate(room) if left >= lengths[document]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(most)
        rows[row].append(document)
        room[row] -= lengths[document]
    return rows


def pack(batch: EncodedBatch) -> EncodedBatch:
    """The same documents in fewer rows of the same length, each row's documents one after the other.

    Args:
        batch: right-padded, a document a row.

    Returns:
        The batch itself where no two documents fit into a row.
    """
    lengths = batch.attention_mask.sum(1).tolist()
    rows = first_fit(lengths)
    if len(rows) == len(batch):
        return batch
    made = _empty(batch, rows)
    for row, members in enumerate(rows):
        at, asked = 0, 0
        for index, b in enumerate(members):
            tokens, questions = lengths[b], int((batch.target[b] >= 0).sum())
            for name in _TOKENS:
                made[name][row, at : at + tokens] = getattr(batch, name)[b, :tokens]
            for name in (*_PLACES, *_VALUES):
                theirs = getattr(batch, name)[b, :questions]
                moved = theirs.where(theirs < 0, theirs + at) if name in _PLACES else theirs
                made[name][row, asked : asked + questions] = moved
            made["documents"][row, at : at + tokens] = index
            at, asked = at + tokens, asked + questions
        made["documents"][row, at:] = len(members)
    return EncodedBatch(**made)


def _empty(batch: EncodedBatch, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows of padding, with room for the questions of all their documents."""
    shape, questions = (len(rows), batch.input_ids.shape[1]), (batch.target >= 0).sum(1)
    pad = batch.input_ids[~batch.attention_mask.bool()][0]
    filled = {"input_ids": pad, "attention_mask": 0, "answers": False}
    made = {name: getattr(batch, name).new_empty(shape).fill_(value) for name, value in filled.items()}
    most = max(1, *(int(questions[list(members)].sum()) for members in rows))
    for name in (*_PLACES, *_VALUES):
        theirs = getattr(batch, name)
        made[name] = theirs.new_full((len(rows), most, *theirs.shape[2:]), -1)
    return {**made, "documents": torch.empty(shape, dtype=torch.int32)}
