"""From text to tensors: every position points at the text that it claims."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from surgery.data.choices import choice_tokens, distinct_prefixes
from surgery.data.encoding import EncodedBatch, encode, stack
from surgery.data.positions import encode_each
from surgery.errors import ProbeError
from surgery.probes.documents import Document, Question, Writer, draw, rng_of, split_of
from tests.support.pico import pico_tokenizer
from tests.support.samples import ASKING, MAKERS, RETRIEVING, cut, sample, several_questions

Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")
BATCHES = {task: sample(task) for task in MAKERS}
BATCHES["several questions"] = several_questions()
BATCHES["all tasks"] = [document for task in MAKERS for document in sample(task, 1)]
WITH_QUESTIONS = [*ASKING, "several questions"]
POSITIONS = ("query", "segment_start", "segment_end", "answer_token")


def decode(ids: torch.Tensor) -> str:
    text = pico_tokenizer().decode(ids.tolist(), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


def row_text(batch: EncodedBatch, row: int) -> str:
    return decode(batch.input_ids[row][batch.attention_mask[row].bool()])


@pytest.mark.parametrize("task", MAKERS)
def test_spans_cut_out_what_they_claim(task: str) -> None:
    for document in sample(task, 20):
        assert document.task == task
        assert document.text.isascii()
        assert bool(document.questions) == (task in ASKING)
        for question in document.questions:
            answer = cut(document, question.answer)
            assert answer
            assert question.choices[question.gold] == answer
            assert len(set(question.choices)) == len(question.choices) > 1
            assert (question.segment is not None) == (question.value is not None) == (task in RETRIEVING)
            if question.segment is not None and question.value is not None:
                assert cut(document, question.value) == answer.strip()
                assert question.segment[0] <= question.value[0] < question.value[1] <= question.segment[1]
                assert question.segment[1] <= question.answer[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BATCHES)
def test_rows_hold_the_whole_text_and_padding(name: str, side: Side) -> None:
    documents = BATCHES[name]
    batch = encode(documents, pico_tokenizer(), side)
    assert len(batch) == len(documents)
    for row, document in enumerate(documents):
        assert row_text(batch, row) == document.text
        mask = batch.attention_mask[row]
        length = int(mask.sum())
        assert mask.tolist() == ([0] * (len(mask) - length) + [1] * length)[:: 1 if side == "left" else -1]
        assert (batch.input_ids[row][mask == 0] == pico_tokenizer().pad_token_id).all()
    assert batch.attention_mask.sum(1).max() == batch.input_ids.shape[1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", WITH_QUESTIONS)
def test_positions_point_at_the_tokens_that_they_claim(name: str, side: Side) -> None:
    documents = BATCHES[name]
    batch = encode(documents, pico_tokenizer(), side)
    for row, document in enumerate(documents):
        ids, first = batch.input_ids[row], int(batch.attention_mask[row].argmax())
        for q, question in enumerate(document.questions):
            query = int(batch.query[row, q])
            assert decode(ids[first : query + 1]) == document.text[: question.answer[0]]
            assert ids[query + 1] == batch.target[row, q]
            assert decode(ids[query + 1 :]).startswith(cut(document, question.answer))
            assert batch.choice_ids[row, q, batch.gold[row, q]] == batch.target[row, q]
            if question.segment is not None and question.value is not None:
                start, end = int(batch.segment_start[row, q]), int(batch.segment_end[row, q])
                assert decode(ids[start : end + 1]) == cut(document, question.segment)
                value = int(batch.answer_token[row, q])
                assert decode(ids[first:value]) == document.text[: question.value[0]]
                assert decode(ids[value : value + 1]) == cut(document, question.value)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BATCHES)
def test_answers_mask_covers_exactly_the_answers(name: str, side: Side) -> None:
    documents = BATCHES[name]
    batch = encode(documents, pico_tokenizer(), side)
    assert not (batch.answers & (batch.attention_mask == 0)).any()
    for row, document in enumerate(documents):
        marked = decode(batch.input_ids[row][batch.answers[row]])
        assert marked == "".join(cut(document, q.answer) for q in document.questions)
        for q in range(len(document.questions)):
            query = int(batch.query[row, q])
            assert not batch.answers[row, query]
            assert batch.answers[row, query + 1]


@pytest.mark.parametrize("name", BATCHES)
def test_what_does_not_exist_is_minus_one(name: str) -> None:
    documents = BATCHES[name]
    batch = encode(documents, pico_tokenizer(), "left")
    for row, document in enumerate(documents):
        asked = len(document.questions)
        for column in (*POSITIONS, "target", "gold", "choice_ids"):
            assert (getattr(batch, column)[row, asked:] == -1).all()
        for q, question in enumerate(document.questions):
            assert (batch.choice_ids[row, q] >= 0).sum() == len(question.choices)
            missing = question.segment is None
            for column in ("segment_start", "segment_end", "answer_token"):
                assert (getattr(batch, column)[row, q] == -1) == missing


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", WITH_QUESTIONS)
def test_until_answer_ends_at_the_last_query(name: str, side: Side) -> None:
    documents = BATCHES[name]
    batch = encode(documents, pico_tokenizer(), side, until_answer=True)
    whole = encode(documents, pico_tokenizer(), side)
    for row, document in enumerate(documents):
        last = len(document.questions) - 1
        assert row_text(batch, row) == document.text[: document.questions[last].answer[0]]
        end = int(batch.attention_mask[row].nonzero().max())
        assert batch.query[row, last] == end
        if side == "left":
            assert end == batch.input_ids.shape[1] - 1
        marked = decode(batch.input_ids[row][batch.answers[row]])
        assert marked == "".join(cut(document, q.answer) for q in document.questions[:last])
    for column in ("target", "gold", "choice_ids"):
        assert torch.equal(getattr(batch, column), getattr(whole, column))


@pytest.mark.parametrize("task", ["sentence", "statement"])
def test_until_answer_refuses_a_document_without_a_question(task: str) -> None:
    with pytest.raises(ProbeError, match=task):
        encode(BATCHES[task], pico_tokenizer(), until_answer=True)


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """One token a byte but for the merges: numbers of the same first digit start with the same token."""
    alphabet = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def asked(answer: str, *others: str, prompt: str = "Say:") -> Document:
    writer = Writer()
    writer.add(prompt)
    span = writer.add(answer)
    return Document("made_up", writer.text, (Question(span, (answer, *others), 0),))


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
    def found(*values: str) -> list[str]:
        return scored_by(encode([looked_up(*values)], byte_tokenizer()))

    assert found("712", "80", "6") == ["7", "8", "6"]
    assert found("712", "80", "723") == ["71", "80", "72"]
    assert found("712", "80", "713", "6") == ["712", "80\n", "713", "6\n"]


def test_a_value_that_begins_another_is_scored_with_its_end() -> None:
    batch = encode([looked_up("7", "71", "70"), looked_up("71", "7", "42")], byte_tokenizer())
    assert scored_by(batch) == ["7\n", "71", "70"]
    assert scored_by(batch, 1) == ["71", "7\n", "42"]
    assert torch.equal(batch.choice_ids, batch.choice_tokens[..., 0]) and batch.choice_rest.shape[-1] == 1


def test_what_cannot_be_told_apart_is_refused() -> None:
    """Nothing is known to end the shorter one; the same tokens twice."""
    for first, other in (("7", "71"), ("71", "7"), ("71", "71")):
        with pytest.raises(ProbeError, match="made_up choices"):
            encode([asked(first, "80", other)], byte_tokenizer())
    with pytest.raises(ProbeError, match="made_up choices"):
        encode([looked_up("71", "80", "71")], byte_tokenizer())


def test_told_apart_against_every_pair() -> None:
    """No choice begins another, and with a token fewer two of them would be the same or one would begin another."""
    rng = rng_of("told apart")
    for _ in range(200):
        numbers = [str(n) for n in rng.sample(range(1000), rng.randint(2, 9))]
        choices = [tuple(map(int, n)) for n in numbers]
        found = distinct_prefixes(choices, [(99,)] * len(choices))
        depth = max(map(len, found))
        whole = [(*choice, 99) for choice in choices]
        assert found == [w[:depth] for w in whole]
        assert all(a[: len(b)] != b for a, b in itertools.permutations(found, 2))
        fewer = [w[: depth - 1] for w in whole]
        assert any(a[: len(b)] == b for a, b in itertools.permutations(fewer, 2))


def test_an_answer_of_several_tokens_is_marked_whole() -> None:
    batch = encode([asked("71", "80")], byte_tokenizer())
    assert batch.answers[0].tolist() == [False] * 4 + [True] * 2
    assert batch.query.tolist() == [[3]]
    assert scored_by(batch) == ["7", "8"]


@pytest.mark.parametrize("trim", [False, True])
def test_an_answer_that_does_not_begin_with_a_token_is_refused(trim: bool) -> None:
    """Whether the tokenizer's offsets show the space that a token holds, or leave it out."""
    tokenizer = byte_tokenizer(("Ġ", "7"))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    with pytest.raises(ProbeError, match="end of the prompt"):
        encode([asked("7", "8", prompt="Say: ")], tokenizer)
    assert len(encode([asked("8", "9", prompt="Say: ")], tokenizer)) == 1
    assert scored_by(encode([asked("7", "8", prompt="Say:")], tokenizer)) == ["7", "8"]


def test_a_token_of_several_characters_of_the_prompt_is_refused_too() -> None:
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


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(pico_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", ASKING)
def test_choices_of_a_task_have_distinct_first_tokens(name: str) -> None:
    texts = {choice for document in sample(name, 60) for question in document.questions for choice in question.choices}
    starts = {text: choice_tokens(ids_of, text)[0] for text in texts}
    for document in sample(name, 60):
        for question in document.questions:
            assert len({starts[c] for c in question.choices}) == len(question.choices)
    assert encode(sample(name, 60), pico_tokenizer()).choice_rest.shape[-1] == 0


def test_a_choice_without_a_token_is_refused() -> None:
    with pytest.raises(ProbeError, match="choice"):
        choice_tokens(ids_of, "")


def test_moving_and_slicing_keep_every_field() -> None:
    batch = encode(BATCHES["kv_retrieval"], pico_tokenizer())
    moved, part = batch.to("cpu"), batch[1:3]
    assert len(part) == 2 and part.documents is None
    for field in fields(EncodedBatch)[:-2]:
        assert torch.equal(getattr(moved, field.name), getattr(batch, field.name))
        assert torch.equal(getattr(part, field.name), getattr(batch, field.name)[1:3])


def test_writer_remembers_spans() -> None:
    writer = Writer()
    pieces = ["ab", "", "c\n", " d"]
    spans = [writer.add(piece) for piece in pieces]
    assert writer.text == "".join(pieces)
    assert [writer.text[a:b] for a, b in spans] == pieces


def test_generators_depend_on_their_key_alone() -> None:
    def numbers(*key: object) -> list[float]:
        return [rng_of(*key).random() for _ in range(2)]

    assert numbers("a", 1) == numbers("a", 1)
    keys: list[tuple[object, ...]] = [("a", 1), ("a", 2), ("b", 1), ("a", 1, 0), ("a",)]
    assert all(numbers(*one) != numbers(*two) for one, two in itertools.combinations(keys, 2))


@pytest.mark.parametrize("share", [2, 5, 10])
def test_one_text_in_so_many_is_for_evaluation(share: int) -> None:
    splits = [split_of(f"text {i}", share) for i in range(2000)]
    assert splits == [split_of(f"text {i}", share) for i in range(2000)]
    assert 0.8 / share < splits.count("eval") / len(splits) < 1.2 / share


def test_draw_returns_the_split_that_was_asked_for() -> None:
    rng = rng_of("draw")
    for split in ("train", "eval"):
        assert all(split_of(draw(split, lambda: str(rng.random()))) == split for _ in range(20))


def test_draw_gives_up_on_a_generator_of_one_text() -> None:
    other = "eval" if split_of("always this") == "train" else "train"
    with pytest.raises(ProbeError, match="split"):
        draw(other, lambda: "always this")


def test_without_choices_a_batch_differs_in_the_choices_alone() -> None:
    """No choice is tokenized, so even choices that cannot be told apart pass."""
    documents = BATCHES["several questions"]
    plain, ranked = encode(documents, pico_tokenizer(), choices=False), encode(documents, pico_tokenizer())
    for field in fields(EncodedBatch)[:-2]:
        if field.name.startswith("choice"):
            assert (getattr(plain, field.name) == -1).all()
        else:
            assert torch.equal(getattr(plain, field.name), getattr(ranked, field.name))
    assert len(encode([asked("71", "71")], byte_tokenizer(), choices=False)) == 1


def test_documents_that_were_tokenized_together_make_the_batches_of_each_part() -> None:
    documents = BATCHES["all tasks"]
    each = encode_each(documents, pico_tokenizer(), choices=False)
    for part in (slice(0, 3), slice(3, None)):
        one = stack(each[part], int(pico_tokenizer().pad_token_id))
        other = encode(documents[part], pico_tokenizer(), choices=False)
        assert all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(EncodedBatch)[:-2])
