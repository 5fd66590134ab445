"""From text to tensors: every position points at the text that it claims."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Literal

import pytest
import torch
from tokenizers import normalizers, processors

from surgery.data.choices import distinct_prefixes
from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Writer, rng_of
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.pico import pico_tokenizer
from tests.support.samples import MAKERS, cut, sample, several_questions

Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")
BATCHES = {task: sample(task) for task in MAKERS}
BATCHES["several questions"] = several_questions()
BATCHES["all tasks"] = [document for task in MAKERS for document in sample(task, 1)]


def decode(ids: torch.Tensor) -> str:
    return str(pico_tokenizer().decode(ids.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("side", SIDES)
def test_rows_hold_the_whole_text_and_padding(side: Side) -> None:
    for name, documents in BATCHES.items():
        batch = encode(documents, pico_tokenizer(), side)
        assert len(batch) == len(documents)
        for row, document in enumerate(documents):
            mask = batch.attention_mask[row]
            length = int(mask.sum())
            assert decode(batch.input_ids[row][mask.bool()]) == document.text, name
            assert mask.tolist() == ([0] * (len(mask) - length) + [1] * length)[:: 1 if side == "left" else -1], name
            assert (batch.input_ids[row][mask == 0] == pico_tokenizer().pad_token_id).all(), name
        assert batch.attention_mask.sum(1).max() == batch.input_ids.shape[1], name


@pytest.mark.parametrize("side", SIDES)
def test_positions_point_at_the_tokens_that_they_claim(side: Side) -> None:
    """And what does not exist is -1."""
    for name, documents in BATCHES.items():
        batch = encode(documents, pico_tokenizer(), side)
        for row, document in enumerate(documents):
            ids, first = batch.input_ids[row], int(batch.attention_mask[row].argmax())
            for q, question in enumerate(document.questions):
                query = int(batch.query[row, q])
                assert decode(ids[first : query + 1]) == document.text[: question.answer[0]], name
                assert ids[query + 1] == batch.target[row, q], name
                assert decode(ids[query + 1 :]).startswith(cut(document, question.answer)), name
                assert batch.choice_ids[row, q, batch.gold[row, q]] == batch.target[row, q], name
                assert (batch.choice_ids[row, q] >= 0).sum() == len(question.choices), name
                start, end, value = (
                    int(getattr(batch, n)[row, q]) for n in ("segment_start", "segment_end", "answer_token")
                )
                if question.segment is None or question.value is None:
                    assert start == end == value == -1, name
                else:
                    assert decode(ids[start : end + 1]) == cut(document, question.segment), name
                    assert decode(ids[first:value]) == document.text[: question.value[0]], name
                    assert decode(ids[value : value + 1]) == cut(document, question.value), name
            asked = len(document.questions)
            for column in ("query", "segment_start", "segment_end", "answer_token", "target", "gold", "choice_ids"):
                assert (getattr(batch, column)[row, asked:] == -1).all(), (name, column)


@pytest.mark.parametrize("side", SIDES)
def test_until_answer_ends_at_the_last_query(side: Side) -> None:
    for name, documents in BATCHES.items():
        if not all(document.questions for document in documents):
            with pytest.raises(ProbeError, match=r"documents: .* without a question"):
                encode(documents, pico_tokenizer(), until_answer=True)
            continue
        batch, whole = (encode(documents, pico_tokenizer(), side, until_answer=until) for until in (True, False))
        for row, document in enumerate(documents):
            last = len(document.questions) - 1
            kept = batch.attention_mask[row].bool()
            assert decode(batch.input_ids[row][kept]) == document.text[: document.questions[last].answer[0]], name
            end = int(kept.nonzero().max())
            assert batch.query[row, last] == end and (side == "right" or end == len(kept) - 1), name
            marked = decode(batch.input_ids[row][batch.answers[row]])
            assert marked == "".join(cut(document, q.answer) for q in document.questions[:last]), name
        for column in ("target", "gold", "choice_ids"):
            assert torch.equal(getattr(batch, column), getattr(whole, column)), name


def asked(answer: str, *others: str, prompt: str = "Say:") -> Document:
    span = (len(prompt), len(prompt + answer))
    return Document("made_up", prompt + answer, (Question(span, (answer, *others), 0),))


def looked_up(answer: str, *others: str) -> Document:
    """Values that a line break ends, and a question for the first."""
    writer = Writer()
    start, _ = writer.add("a:")
    value = writer.add(answer)
    _, end = writer.add("\n")
    for other in others:
        writer.add(f"b:{other}\n")
    span = writer.add(answer)
    question = Question(span, (answer, *others), 0, segment=(start, end), value=value)
    return Document("made_up", writer.text, (question,))


def scored_by(batch: EncodedBatch, row: int = 0) -> list[str]:
    """The text of the tokens that each choice of the last question is scored by."""
    tokens_BKC, _ = batch.last_question()
    return [byte_tokenizer().decode(choice[choice >= 0].tolist()) for choice in tokens_BKC[row]]


def test_choices_are_scored_by_the_fewest_tokens_that_tell_them_apart() -> None:
    """A value that begins another is scored with its end."""
    for values, scored in (
        (("712", "80", "6"), ["7", "8", "6"]),
        (("712", "80", "723"), ["71", "80", "72"]),
        (("712", "80", "713", "6"), ["712", "80\n", "713", "6\n"]),
        (("7", "71", "70"), ["7\n", "71", "70"]),
        (("71", "7", "42"), ["71", "7\n", "42"]),
    ):
        assert scored_by(encode([looked_up(*values)], byte_tokenizer())) == scored


def test_what_cannot_be_told_apart_is_refused() -> None:
    """Nothing is known to end the shorter one; the same tokens twice."""
    refused = [asked(first, "80", other) for first, other in (("7", "71"), ("71", "7"), ("71", "71"))]
    for document in (*refused, looked_up("71", "80", "71")):
        with pytest.raises(ProbeError, match="made_up choices"):
            encode([document], byte_tokenizer())


def test_told_apart_against_every_pair() -> None:
    """No choice begins another, and with a token fewer two of them would be the same or one would begin another."""
    rng = rng_of("told apart")
    for _ in range(100):
        numbers = [str(n) for n in rng.sample(range(1000), rng.randint(2, 9))]
        choices = [tuple(map(int, n)) for n in numbers]
        found = distinct_prefixes(choices, [(99,)] * len(choices))
        depth = max(map(len, found))
        whole = [(*choice, 99) for choice in choices]
        assert found == [w[:depth] for w in whole]
        assert all(a[: len(b)] != b for a, b in itertools.permutations(found, 2))
        fewer = [w[: depth - 1] for w in whole]
        assert any(a[: len(b)] == b for a, b in itertools.permutations(fewer, 2))


def test_an_answer_that_does_not_begin_with_a_token_is_refused() -> None:
    """Whether the tokenizer's offsets show the space that a token holds, or leave it out."""
    for trim in (False, True):
        tokenizer = byte_tokenizer(("Ġ", "7"))
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        with pytest.raises(ProbeError, match="end of the prompt"):
            encode([asked("7", "8", prompt="Say: ")], tokenizer)
        assert len(encode([asked("8", "9", prompt="Say: ")], tokenizer)) == 1
    tokenizer = byte_tokenizer(("y", ":"), ("a", "y:"), ("ay:", "7"))
    with pytest.raises(ProbeError, match="ay:7"):
        encode([asked("7", "8")], tokenizer)


def test_choices_are_tokenized_as_they_stand_after_the_prompt() -> None:
    """Some tokenizers put a space before every text: it would be the first token of every choice."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    batch = encode([asked("71", "80")], tokenizer)
    assert scored_by(batch) == ["7", "8"]
    assert batch.choice_ids[0, 0, 0] == batch.target[0, 0]


def test_without_choices_a_batch_differs_in_the_choices_alone() -> None:
    """No choice is tokenized, so even choices that cannot be told apart pass. Slicing keeps every field."""
    documents = BATCHES["several questions"]
    plain, ranked = encode(documents, pico_tokenizer(), choices=False), encode(documents, pico_tokenizer())
    for field in fields(EncodedBatch)[:-2]:
        one, other = getattr(plain, field.name), getattr(ranked, field.name)
        assert (one == -1).all() if field.name.startswith("choice") else torch.equal(one, other), field.name
        assert torch.equal(getattr(ranked.to("cpu")[1:], field.name), other[1:]), field.name
    assert ranked[1:].documents is None
    assert len(encode([asked("71", "71")], byte_tokenizer(), choices=False)) == 1
