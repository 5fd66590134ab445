"""Documents in fewer rows: none is lost, none is cut, and every position still points at what it did."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch, encode
from surgery.train.packing import first_fit, pack, row_length
from tests.support.long_choices import digit_tokenizer
from tests.support.pico import pico_tokenizer
from tests.support.samples import MAKERS, sample, several_questions

PLACES = ("query", "segment_start", "segment_end", "answer_token")
READS = ("read_query", "read_segment_end", "read_answer_token")


def mixed(tokenizer: Callable[[], PreTrainedTokenizerFast] = pico_tokenizer) -> EncodedBatch:
    """Of every task, with and without questions, and of very different lengths."""
    documents = [*several_questions(4), *(d for task in MAKERS for d in sample(task, 3))]
    return encode(documents, tokenizer())


def split(batch: EncodedBatch) -> list[tuple]:
    """Every document alone: tokens, answers, and questions and reads with positions from its first token."""
    found = []
    which = batch.documents if batch.documents is not None else torch.zeros_like(batch.input_ids)
    for row in range(len(batch)):
        real = batch.attention_mask[row].bool()
        asked = [q for q in range(batch.target.shape[1]) if batch.target[row, q] >= 0]
        for document in which[row][real].unique().tolist():
            (there,) = (real & (which[row] == document)).nonzero(as_tuple=True)
            start, stop = int(there[0]), int(there[-1]) + 1
            assert stop - start == len(there), "a document is in one piece"
            questions = []
            for q in asked:
                if start <= int(batch.query[row, q]) < stop:
                    moved = [int(getattr(batch, name)[row, q]) for name in PLACES]
                    kept = (int(batch.target[row, q]), int(batch.gold[row, q]), batch.choice_tokens[row, q].tolist())
                    questions.append(([x - start if x >= 0 else x for x in moved], kept))
            ids, answers = batch.input_ids[row, there].tolist(), batch.answers[row, there].tolist()
            columns = zip(*(getattr(batch, name)[row].tolist() for name in READS), strict=True)
            reads = [[x - start if x >= 0 else x for x in read] for read in columns if start <= read[0] < stop]
            found.append((ids, answers, questions, reads))
    return sorted(found, key=str)


def test_every_document_is_there_with_its_questions() -> None:
    for tokenizer in (pico_tokenizer, digit_tokenizer):
        batch = mixed(tokenizer)
        packed = pack(batch)
        assert len(packed) < len(batch) and packed.input_ids.shape[1] == row_length(batch.input_ids.shape[1])
        assert split(packed) == split(batch)
        assert sum(len(questions) for *_, questions, _ in split(packed)) == int((batch.target >= 0).sum())
        assert sum(len(reads) for *_, reads in split(packed)) == int((batch.read_query >= 0).sum())
        assert (batch.read_query.shape[1] > batch.query.shape[1]) == (tokenizer is digit_tokenizer)
        asked = packed.target >= 0  # the questions of a row come first, as everywhere
        assert asked.any(1).sum() > 1 and not asked.int().diff(dim=1).gt(0).any()


def test_padding_is_one_more_document_at_the_end() -> None:
    packed = pack(mixed())
    assert packed.documents is not None and packed.documents.dtype == torch.int32
    for row in range(len(packed)):
        which, real = packed.documents[row], packed.attention_mask[row].bool()
        assert which[0] == 0 and set(which.diff().tolist()) <= {0, 1}
        assert not real.all() or which[-1] == which[real].max()
        assert (which[~real] == which[real].max() + 1).all() and not real.int().diff().gt(0).any()
    pad = pico_tokenizer().pad_token_id
    assert (packed.input_ids[packed.attention_mask == 0] == pad).all()


def test_rows_have_few_lengths() -> None:
    """At most four an octave, none shorter than the text, and with little padding."""
    lengths = {n: row_length(n) for n in range(1, 4097)}
    assert all(n <= length < max(n + 16, 1.25 * n + 1) for n, length in lengths.items())
    assert len({length for n, length in lengths.items() if 512 < n <= 4096}) == 12


def test_first_fit() -> None:
    """Every document once, no row longer than the longest, and not many more rows than there have to be."""
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 60))]
        rows = first_fit(lengths, max(lengths))
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= max(lengths) for row in rows)
        assert len(rows) <= 11 / 9 * -(-sum(lengths) // max(lengths)) + 2
