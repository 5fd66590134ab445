"""The user's own documents, for each training step.

The documents of a step depend only on (seed, source, step) and the data. All rows are checked before training starts;
streamed rows are checked as they arrive.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.data.documents import Reader, check_documents
from surgery.data.files import ShuffledEpochs, open_rows, rows_in_order
from surgery.data.generated import GeneratedStream, Stream
from surgery.data.pieces import Piece, part
from surgery.probes.documents import Document, rng_of
from surgery.recipe import Columns, Data, Source, Train

_COUNTED = 1000  # rows of streamed data to count answer spans in


def open_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    index: int,
    context: int | None = None,
    vocab_size: int | None = None,
    texts: Path | None = None,
) -> Stream:
    """Open the documents of a source, and check them as far as possible before training.

    Args:
        index: index of the source in the recipe.
        context: maximum tokens of the model; no limit if None.
        vocab_size: rows of the model's embedding.
        texts: file of `write_texts`, for `base_text`. By default other texts of the same length stand for them.

    Raises:
        DataError: the data cannot be read, a row is unusable and `on_bad_row` is `error`, or a generated document does
            not fit the model.
    """
    if source.base_text is not None and texts is not None:
        written = Data(path=str(texts), columns=Columns(text="text"), end=False)
        # Whole: text can have a token more than was sampled, and that would be a piece of its own.
        source = source.model_copy(update={"base_text": None, "data": written, "max_tokens": None})
    if source.data is None:
        generated = GeneratedStream(source, tokenizer, seed, index)
        check_documents(generated.smallest_and_largest(), tokenizer, vocab_size, context)
        check_documents(generated.step(0), tokenizer, vocab_size, context)
        return generated
    reader = Reader(source.data, tokenizer, source.max_tokens, context, vocab_size)
    kind = StreamedDocuments if source.data.streaming else IndexedDocuments
    return kind(source, reader, seed, index)


def read_documents(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    limit: int | None = None,
    context: int | None = None,
    vocab_size: int | None = None,
    held_out: bool = False,
) -> tuple[list[Document], int]:
    """Read documents in the order of the files, and count the rows that were skipped until the last one.

    Args:
        limit: maximum number of documents; all if None. Of held-out rows, which a file may list by kind, documents at
            equal distances are taken, and of streamed data the first ones.
        held_out: read the rows that `data.holdout` keeps from training, instead of the others.

    Raises:
        DataError: as `open_source`.
    """
    reader = Reader(data, tokenizer, max_tokens, context, vocab_size, held_out)
    spread = held_out and not data.streaming
    documents = [piece.document for piece in islice(reader.read(rows_in_order(data)), None if spread else limit)]
    if not documents:
        raise reader.empty_error()
    if limit is not None and len(documents) > limit:
        documents = [documents[i * len(documents) // limit] for i in range(limit)]
    return documents, reader.skipped


def count_answer_spans(
    train: Train, tokenizer: PreTrainedTokenizerBase, context: int | None = None, vocab_size: int | None = None
) -> dict[str, dict[str, int]]:
    """Count the training rows of all data with `answer_span: auto`, by the place of the answer.

    Returns:
        By the name of the data: the rows that are `found`, `ambiguous` or `missing` (see `find_answer`), and `marked`
        if some have a span of their own. For streamed data, `first_rows` is the number of rows that were read. Data
        in which every row is marked has no entry.

    Raises:
        DataError: as `open_source`.
    """
    counts: dict[str, dict[str, int]] = {}
    for source, name in named_data(train):
        data = source.data
        if data is None or not data.columns.finds_spans or data.columns.text is not None:
            continue
        reader = Reader(data, tokenizer, source.max_tokens, context, vocab_size)
        numbers, rows = count(), islice(rows_in_order(data), _COUNTED if data.streaming else None)
        deque(reader.read(row for row, _ in zip(rows, numbers, strict=False)), maxlen=0)
        searched = {kind: reader.spans[kind] for kind in ("found", "ambiguous", "missing")}
        if any(searched.values()):
            marked = {"marked": reader.spans["marked"]} if reader.spans["marked"] else {}
            counts[name] = {**searched, **marked, **({"first_rows": next(numbers)} if data.streaming else {})}
    return counts


def named_data(train: Train) -> list[tuple[Source, str]]:
    """Return the first source of every data set, and the name of the data set, with a number if another one has it."""
    named: dict[str, Source] = {}
    for source in [source for stage in train.sequence for source in stage.sources]:
        if source.data is None or any(source.data == other.data for other in named.values()):
            continue
        name = source.data.public_name
        candidates = chain([name], (f"{name} ({number})" for number in count(2)))
        named[next(candidate for candidate in candidates if candidate not in named)] = source
    return [(source, name) for name, source in named.items()]


class IndexedDocuments:
    """Documents with random access, all checked. Every epoch has all documents, in a different order.

    Only the place and the number of tokens of each document are kept in memory.
    """

    def __init__(self, source: Source, reader: Reader, seed: int, index: int) -> None:
        assert source.data is not None
        self.source, self.reader, self._key = source, reader, (seed, index)
        self._rows = open_rows(source.data)
        pieces = array("q")
        for piece in reader.read(self._rows):
            pieces.extend((piece.row, *piece.span, piece.tokens))
        if not pieces:
            raise reader.empty_error()
        self._pieces_N4 = np.array(pieces, dtype=np.int64).reshape(-1, 4)
        self.skipped = reader.skipped
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        self._starts = [0]  # place of the first document of each step, if steps are sized in tokens

    def __len__(self) -> int:
        return len(self._pieces_N4)

    def step(self, step: int) -> list[Document]:
        """`rows` documents, or as many as fit into `tokens`. The next step starts where this one ends."""
        documents = []
        for epoch, at in (divmod(place, len(self)) for place in self._places(step)):
            row, start, end, _ = self._pieces_N4[self._epoch(epoch)[0][at]].tolist()
            documents.append(part(self.reader.document(self._rows[row]), (start, end)))
        return documents

    def largest_step(self) -> list[Document]:
        """Return the documents of the step of the first epoch that is largest when padded, longest document first."""
        tokens_N = self._pieces_N4[self._epoch(0)[0], 3]
        largest, size = 0, 0
        for step in count():
            places = self._places(step)
            if places.start >= len(self):
                break
            padded = int(tokens_N[places.start : places.stop].max()) * len(places)
            if padded > size:
                largest, size = step, padded
        return sorted(self.step(largest), key=lambda document: -len(document.text))

    def _places(self, step: int) -> range:
        """Return the places of a step's documents, counted over all epochs."""
        if self.source.rows is not None:
            return range(step * self.source.rows, (step + 1) * self.source.rows)
        while len(self._starts) < step + 2:
            self._starts.append(self._next(self._starts[-1], self.source.tokens or 0))
        return range(self._starts[step], self._starts[step + 1])

    def _epoch_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of an epoch, (N,), which depends on (seed, source, epoch).

        And the tokens before each document in this order, with the total: (N+1,).
        """
        seed = rng_of("data", *self._key, epoch).getrandbits(64)
        order_N = np.random.default_rng(seed).permutation(len(self))
        return order_N, np.concatenate([[0], np.cumsum(self._pieces_N4[order_N, 3])])

    def _next(self, place: int, room: int) -> int:
        """Return the place after the documents from `place` that fit into `room` tokens; at least one document."""
        end = place
        while True:
            epoch, at = divmod(end, len(self))
            _, before_N1 = self._epoch(epoch)
            fits = int(np.searchsorted(before_N1, before_N1[at] + room, side="right")) - 1
            end = epoch * len(self) + fits
            if fits < len(self):
                return max(end, place + 1)
            room -= int(before_N1[-1] - before_N1[at])


class StreamedDocuments:
    """Documents that are read during training. Resuming, or requesting an earlier step, reads from the beginning."""

    def __init__(self, source: Source, reader: Reader, seed: int, index: int) -> None:
        assert source.data is not None
        self.source, self.reader = source, reader
        self._epochs = ShuffledEpochs(source.data, rng_of("stream", seed, index).getrandbits(32))
        self._steps, self._at = self._grouped(), -1
        self._ready: list[Document] = []
        self.step(0)  # reports unusable first rows before training

    def step(self, step: int) -> list[Document]:
        """`rows` documents, or as many as fit into `tokens`. The next step starts where this one ends."""
        if step < self._at:
            self._steps, self._at = self._grouped(), -1
        while self._at < step:
            self._ready, self._at = next(self._steps), self._at + 1
        return self._ready

    def _grouped(self) -> Iterator[list[Document]]:
        """Yield the documents of each step, without end."""
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
        """Yield the documents of all epochs."""
        for epoch in count():
            self.reader.skipped, self.reader.first_error, empty = 0, None, True
            for piece in self.reader.read(self._epochs.rows(epoch)):
                empty = False
                yield piece
            if empty:
                raise self.reader.empty_error()
