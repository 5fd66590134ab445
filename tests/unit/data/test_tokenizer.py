"""The small tokenizer: any text survives, few entries, the same every time."""

from __future__ import annotations

from random import Random

import pytest

from surgery.data.tokenizer import END, PAD, build_tokenizer
from surgery.probes.words import entity_names, key_words
from tests.support.pico import pico_tokenizer

TEXTS = {
    "empty": "",
    "space": " ",
    "spaces": "   a    b  ",
    "tabs": "\ta\t\tb\t",
    "newline": "\n",
    "newlines": "\n\n\r\n\r a\n",
    "control": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "nul": "a\x00b",
    "accents": "Größe, naïve, Ångström, ﬁ ligature",
    "combining": "e\u0301 a\u0308\u0323 \u0301alone",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☺️🇩🇪",
    "cjk": "汉字かなカナ한국어　全角，。",
    "right to left": "עברית العربية \u202eabc\u202c \u200f",
    "zero width": "a\u200bb\u200dc\ufeffd\u2060",
    "odd spaces": "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g",
    "digits": "0 7 42 100 2024 ٣٤ Ⅷ ½ ²",
    "astral": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff \ue000",
    "noncharacters": "\ufffe\uffff\ufffd",
    "code": "def f(x):\n    return {'a': x**2}  # …\n",
    "special look-alikes": "<|pad|> <|endoftext|> <|pad <||>",
    "punctuation": "don't . , ; !  ?!  ( a ) n't 's",
    "apostrophe spaces": "it 's , isn 't it . Yes !",
}


def survives(text: str) -> bool:
    tokenizer = pico_tokenizer()
    return bool(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text)


@pytest.mark.parametrize("name", TEXTS)
def test_text_survives(name: str) -> None:
    assert survives(TEXTS[name])


@pytest.mark.parametrize("seed", range(8))
def test_random_code_points_survive(seed: int) -> None:
    rng = Random(seed)
    planes = [(0, 0xFF), (0x100, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for _ in range(25):
        text = "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 40)))
        assert survives(text), text.encode()


def test_any_byte_has_a_token_and_no_token_stands_for_unknown_text() -> None:
    assert pico_tokenizer().unk_token is None
    for code in range(1, 0x3000, 7):
        assert pico_tokenizer()(chr(code), add_special_tokens=False)["input_ids"]


def test_it_adds_nothing_by_itself() -> None:
    plain = pico_tokenizer()("The value", add_special_tokens=False)["input_ids"]
    assert pico_tokenizer()("The value")["input_ids"] == plain


@pytest.mark.parametrize("size", [600, 1024, 2000])
def test_it_has_no_more_entries_than_asked_for(size: int) -> None:
    tokenizer = build_tokenizer(size)
    assert 258 < len(tokenizer) <= size
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1


def test_further_text_adds_its_words_and_keeps_numbers_whole() -> None:
    text = "In the beginning was a wonderful firmament.\n" * 4000
    tokenizer = build_tokenizer(1024, text)
    word = tokenizer(" firmament")["input_ids"]
    assert len(word) == 1 and len(build_tokenizer(1024)(" firmament")["input_ids"]) > 1
    assert all(len(tokenizer(str(number))["input_ids"]) == 1 for number in range(100))


def test_pad_and_end_are_set_and_differ() -> None:
    tokenizer = pico_tokenizer()
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_building_it_again_gives_the_same_one() -> None:
    again = build_tokenizer()
    assert again.backend_tokenizer.to_str() == pico_tokenizer().backend_tokenizer.to_str()


def test_invented_words_fall_apart_into_their_syllables() -> None:
    for words in (key_words("train"), key_words("eval"), entity_names()):
        for before in ("", " "):
            encoded = pico_tokenizer()([before + word for word in words])["input_ids"]
            for word, ids in zip(words, encoded, strict=True):
                pieces = [pico_tokenizer().decode([i]) for i in ids if pico_tokenizer().decode([i]) != " "]
                syllables = [word[i : i + 2] for i in range(0, len(word), 2)]
                assert [piece.strip() for piece in pieces] == syllables
