"""The user's own data as training documents. Owns: which rows step i sees.

Must never know: models, losses, what a row means (`reader.py`), file formats (`rows.py`). A step's documents depend on
(seed, source, step) and the data alone. Rows are checked before training starts; streamed ones as they come.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.data.documents import Piece, Reader, check_documents, part
from surgery.data.files import ShuffledPasses, open_rows, rows_in_order
from surgery.data.generated import GeneratedStream, Stream
from surgery.probes.documents import Document, rng_of
from surgery.recipe import Data, Source


def open_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    index: int,
    context: int | None = None,
    vocab_size: int | None = None,
) -> Stream:
    """The documents of a source, after the checks that can be made before training.

    Args:
        index: of the source in the recipe.
        context: tokens that the model can take; no limit if None.
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: the data cannot be read, or a row of it cannot be used and `on_bad_row` is `error`; a generated
            document does not fit the model.
    """
    if source.data is None:
        generated = GeneratedStream(source, tokenizer, seed, index)
        check_documents(generated.step(0), tokenizer, vocab_size, context)
        return generated
    reader = Reader(source.data, tokenizer, source.max_tokens, context, vocab_size)
    if source.data.streaming:
        return StreamedDocuments(source, reader, seed, index)
    return IndexedDocuments(source, reader, seed, index)


def read_documents(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    limit: int | None = None,
    context: int | None = None,
    vocab_size: int | None = None,
    held_out: bool = False,
) -> tuple[list[Document], int]:
    """Documents in the order of the file, `limit` at most, and how many rows before the last of them were left out.

    Args:
        held_out: those that `data.holdout` keeps from training, rather than those that are trained on.

    Raises:
        DataError: as `open_source`.
    """
    reader = Reader(data, tokenizer, max_tokens, context, vocab_size, held_out)
    found = [piece.document for piece in islice(reader.read(rows_in_order(data)), limit)]
    if not found:
        raise reader.nothing()
    return found, reader.skipped


class IndexedDocuments:
    """Data whose rows have all been checked: every pass takes all documents, in an order of its own.

    What stays in memory is where each document is and how many tokens it has.
    """

    def __init__(self, source: Source, reader: Reader, seed: int, index: int) -> None:
        assert source.data is not None
        self.source, self.reader, self._key = source, reader, (seed, index)
        self._rows = open_rows(source.data)
        found = array("q")
        for piece in reader.read(self._rows):
            found.extend((piece.row, *piece.span, piece.tokens))
        if not found:
            raise reader.nothing()
        self._pieces_N4 = np.array(found, dtype=np.int64).reshape(-1, 4)
        self.skipped = reader.skipped
        self._order = lru_cache(maxsize=2)(self._order_of)
        self._filled = lru_cache(maxsize=2)(self._filled_of)
        self._starts = [0]  # place of the first document of each step, where steps are so many tokens

    def __len__(self) -> int:
        return len(self._pieces_N4)

    def step(self, step: int) -> list[Document]:
        """The step's documents: `rows` of them, or those that `tokens` hold; the next step begins where it ends."""
        if self.source.rows is not None:
            places = range(step * self.source.rows, (step + 1) * self.source.rows)
        else:
            while len(self._starts) < step + 2:
                self._starts.append(self._next(self._starts[-1], self.source.tokens or 0))
            places = range(self._starts[step], self._starts[step + 1])
        return [self._document(place) for place in places]

    def _document(self, place: int) -> Document:
        """The document at a place of all passes, one after the other."""
        number, at = divmod(place, len(self))
        row, start, end, _ = self._pieces_N4[self._order(number)[at]].tolist()
        return part(self.reader.document(self._rows[row]), (start, end))

    def _order_of(self, number: int) -> np.ndarray:
        """(N,) the order of a pass, by (seed, source, pass) alone."""
        seed = rng_of("data", *self._key, number).getrandbits(64)
        return np.random.default_rng(seed).permutation(len(self))

    def _filled_of(self, number: int) -> np.ndarray:
        """(N+1,) tokens before each document of a pass, and in all."""
        return np.concatenate([[0], np.cumsum(self._pieces_N4[self._order(number), 3])])

    def _next(self, place: int, room: int) -> int:
        """The first place that `room` tokens from `place` on do not hold; one document is always taken."""
        end = place
        while True:
            number, at = divmod(end, len(self))
            filled_N1 = self._filled(number)
            fits = int(np.searchsorted(filled_N1, filled_N1[at] + room, side="right")) - 1
            end = number * len(self) + fits
            if fits < len(self):
                return max(end, place + 1)
            room -= int(filled_N1[-1] - filled_N1[at])


class StreamedDocuments:
    """Data that is read while training. Going back, and going on after a stop, reads again from the beginning."""

    def __init__(self, source: Source, reader: Reader, seed: int, index: int) -> None:
        assert source.data is not None
        self.source, self.reader, self.skipped = source, reader, 0
        self._passes = ShuffledPasses(source.data, rng_of("stream", seed, index).getrandbits(32))
        self._steps, self._at = self._grouped(), -1
        self._ready: list[Document] = []
        self.step(0)  # what is wrong with the first rows shows now

    def step(self, step: int) -> list[Document]:
        """The step's documents: `rows` of them, or those that `tokens` hold; the next step begins where it ends."""
        if step < self._at:
            self._steps, self._at, self.skipped = self._grouped(), -1, 0
        while self._at < step:
            self._ready, self._at = next(self._steps), self._at + 1
        return self._ready

    def _grouped(self) -> Iterator[list[Document]]:
        """Steps without end."""
        group: list[Document] = []
        total = 0
        for piece in self._pieces():
            total += piece.tokens
            full = len(group) == self.source.rows
            if group and (full or (self.source.tokens is not None and total > self.source.tokens)):
                yield group
                group, total = [], piece.tokens
            group.append(piece.document)

    def _pieces(self) -> Iterator[Piece]:
        """Documents of one pass after the other. Bad rows are counted in the first."""
        for number in count():
            self.reader.skipped, self.reader.first, found = 0, None, False
            for piece in self.reader.read(self._passes.rows(number)):
                found = True
                yield piece
                if number == 0:
                    self.skipped = self.reader.skipped
            if not found:
                raise self.reader.nothing()
            if number == 0:
                self.skipped = self.reader.skipped
