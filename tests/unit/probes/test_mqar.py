"""MQAR: pairs and then every key again, words of one token, keys of the splits apart."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import rng_of
from surgery.probes.mqar import mqar_document, mqar_words, single_token_words
from tests.support.pico import pico_tokenizer
from tests.support.samples import cut

KEYS, VALUES = tuple(f"k{i}" for i in range(20)), tuple(f"v{i}" for i in range(12))


@pytest.mark.parametrize(("pairs", "questions"), [(2, None), (12, None), (12, 1), (5, 3)])
def test_exact_text(pairs: int, questions: int | None) -> None:
    document = mqar_document(rng_of("text", pairs), pairs, KEYS, VALUES, questions)
    first, *words = document.text.split(" ")
    entries, again = dict(zip(words[: 2 * pairs : 2], words[1 : 2 * pairs : 2], strict=True)), words[2 * pairs :]
    asked = list(zip(again[::2], again[1::2], strict=True))
    assert first == ""
    assert len(entries) == len(set(entries.values())) == pairs
    assert len(asked) == len(dict(asked)) == len(document.questions) == (pairs if questions is None else questions)
    for (key, value), question in zip(asked, document.questions, strict=True):
        assert entries[key] == value
        assert cut(document, question.answer) == cut(document, question.value) == f" {value}"
        assert cut(document, question.segment) == f" {key} {value}"
        assert question.choices == tuple(f" {v}" for v in entries.values())
        assert question.choices[question.gold] == f" {value}"


def test_the_same_seed_gives_the_same_document_and_another_one_another() -> None:
    one, again, other = (mqar_document(rng_of("seed", s), 6, KEYS, VALUES) for s in (1, 1, 2))
    assert one == again
    assert one.text != other.text


def test_keys_come_back_in_any_order() -> None:
    rng = rng_of("order")
    last = [mqar_document(rng, 4, KEYS, VALUES).questions[-1].gold for _ in range(200)]
    assert all(30 <= last.count(pair) <= 70 for pair in range(4))


def test_words_are_one_token_each_wherever_they_stand() -> None:
    tokenizer, words = pico_tokenizer(), mqar_words(pico_tokenizer())
    document = mqar_document(rng_of("encode"), 24, words.keys, words.values)
    batch = encode([document], tokenizer)
    assert batch.input_ids.shape == (1, 4 * 24)
    assert [tokenizer.decode(i) for i in batch.input_ids[0]] == [f" {w}" for w in document.text[1:].split(" ")]
    assert batch.answer_token.equal(batch.segment_end)
    assert batch.input_ids[0, batch.answer_token[0]].equal(batch.target[0])


def test_keys_are_of_the_lower_half_and_values_of_the_upper() -> None:
    tokenizer, train, other = pico_tokenizer(), mqar_words(pico_tokenizer()), mqar_words(pico_tokenizer(), "eval")
    keys, values = (
        [tokenizer(f" {word}")["input_ids"][0] for word in words] for words in (train.keys + other.keys, train.values)
    )
    assert max(keys) < min(values)
    assert abs(len(keys) - len(values)) <= 1
    assert not set(train.keys) & set(other.keys)
    assert train.values == other.values
    assert 0.1 < len(other.keys) / len(keys) < 0.3


def test_a_tokenizer_without_words_is_refused() -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    assert single_token_words(tokenizer) == ()
    with pytest.raises(ProbeError, match="0 words of one token"):
        mqar_words(tokenizer)


@pytest.mark.parametrize(
    ("pairs", "questions", "field"), [(1, None, "pairs"), (13, None, "pairs"), (4, 0, "questions"), (4, 5, "questions")]
)
def test_impossible_counts_are_refused(pairs: int, questions: int | None, field: str) -> None:
    with pytest.raises(ProbeError) as caught:
        mqar_document(rng_of(0), pairs, KEYS, VALUES, questions)
    assert caught.value.field == field


def test_a_key_that_is_a_value_is_refused() -> None:
    with pytest.raises(ProbeError, match="v3"):
        mqar_document(rng_of(0), 4, (*KEYS, "v3"), VALUES)
