"""JSON-KV: Liu et al.'s text, valid JSON, keys of the splits apart, choices apart in their first token."""

from __future__ import annotations

import json
import re

import pytest

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, rng_of, split_of
from surgery.probes.json_kv import HEADER, UUID, json_kv_document
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

QUESTION = re.compile(r'\nKey: "([0-9a-f-]+)"\nCorresponding value: "([0-9a-f-]+)"\n')


def parts(document: Document) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The object, read by a JSON parser, and the questions with their answers."""
    assert document.text.startswith(HEADER)
    body, asked = document.text.removeprefix(HEADER).split("}\n")
    found = QUESTION.findall(asked)
    assert "".join(f'\nKey: "{k}"\nCorresponding value: "{v}"\n' for k, v in found) == asked
    return json.loads(body + "}"), found


@pytest.mark.parametrize(("pairs", "questions"), [(2, 1), (2, 2), (9, 3), (75, 1), (90, 1)])
def test_exact_text(pairs: int, questions: int) -> None:
    document = json_kv_document(rng_of("text", pairs), pairs, questions)
    entries, asked = parts(document)
    assert len(entries) == len(set(entries.values())) == pairs
    assert len(asked) == len(dict(asked)) == len(document.questions) == questions
    shape = "-".join(f"[0-9a-f]{{{n}}}" for n in UUID)
    assert all(re.fullmatch(shape, text) for pair in entries.items() for text in pair)
    for (key, value), question in zip(asked, document.questions, strict=True):
        assert entries[key] == value == cut(document, question.answer) == cut(document, question.value)
        assert question.choices == tuple(entries.values())
        assert question.choices[question.gold] == value
        assert re.fullmatch(rf'[{{ ]"{key}": "{value}"(,|\}})\n', cut(document, question.segment))


def test_short_groups_make_short_strings() -> None:
    entries, _ = parts(json_kv_document(rng_of("short"), 40, groups=(4,)))
    assert {len(text) for pair in entries.items() for text in pair} == {4}


def test_the_same_seed_gives_the_same_document_and_another_one_another() -> None:
    one, again, other = (json_kv_document(rng_of("seed", s), 6) for s in (1, 1, 2))
    assert one == again
    assert one.text != other.text


def test_any_entry_may_be_asked_for() -> None:
    rng = rng_of("gold")
    asked = [json_kv_document(rng, 4, groups=(4,)).questions[0].gold for _ in range(200)]
    assert all(30 <= asked.count(line) <= 70 for line in range(4))


def test_keys_of_the_splits_are_disjoint() -> None:
    for split in ("train", "eval"):
        entries, _ = parts(json_kv_document(rng_of("split"), 40, split=split, groups=(4,)))
        assert {split_of(key) for key in entries} == {split}


@pytest.mark.parametrize(("pairs", "questions", "field"), [(1, 1, "pairs"), (91, 1, "pairs"), (4, 5, "questions")])
def test_impossible_counts_are_refused(pairs: int, questions: int, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        json_kv_document(rng_of(0), pairs, questions)
    assert caught.value.field == field


@pytest.mark.parametrize("groups", [(3,), (2, 4), (4, 0)])
def test_groups_with_too_few_digits_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(ProbeError) as caught:
        json_kv_document(rng_of(0), 4, groups=groups)
    assert caught.value.field == "groups"


@pytest.mark.parametrize("groups", [UUID, (4,)])
@pytest.mark.parametrize("pairs", [2, 10, 30])
def test_one_token_tells_the_choices_apart(pairs: int, groups: tuple[int, ...]) -> None:
    tokenizer = pico_tokenizer()
    document = json_kv_document(rng_of("encode", pairs), pairs, groups=groups)
    batch, question = encode([document], tokenizer), document.questions[0]
    choices = batch.choice_ids[0, 0].tolist()
    assert len(set(choices)) == pairs
    assert choices[question.gold] == batch.target[0, 0]
    answer = question.choices[question.gold]
    for position in (batch.query[0, 0] + 1, batch.answer_token[0, 0]):
        first = tokenizer.decode(batch.input_ids[0, position])
        assert answer.startswith(first)
    assert tokenizer.decode(batch.input_ids[0, batch.query[0, 0]]).endswith('"')
