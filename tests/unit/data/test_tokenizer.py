"""The small tokenizer: any text survives, few entries, the same every time."""

from __future__ import annotations

from random import Random

from surgery.data.tokenizer import END, PAD, build_tokenizer
from surgery.probes.words import entity_names, key_words
from tests.support.pico import pico_tokenizer

TEXTS = (
    "",
    "   a    b  \ta\t\tb\t\n\r\n\r a\n",
    "".join(map(chr, range(32))) + "\x7f\x80\x9f a\x00b",
    "Größe, naïve, Ångström, ﬁ ligature e\u0301 a\u0308\u0323 \u0301alone",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☺️🇩🇪 𝔘𝔫𝔦 𓀀 \U0010ffff \ue000 \ufffe\uffff\ufffd",
    "汉字かなカナ한국어　全角，。 עברית العربية \u202eabc\u202c \u200f",
    "a\u200bb\u200dc\ufeffd\u2060 a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g",
    "0 7 42 100 2024 ٣٤ Ⅷ ½ ² def f(x):\n    return {'a': x**2}  # …\n",
    "<|pad|> <|endoftext|> <|pad <||> don't . , ; !  ?!  ( a ) n't 's it 's , isn 't it . Yes !",
)


def test_text_survives() -> None:
    tokenizer, rng = pico_tokenizer(), Random(0)
    planes = [(0, 0xFF), (0x100, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    random = ("".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 40))) for _ in range(200))
    for text in (*TEXTS, *random):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text, text.encode()
        assert tokenizer(text)["input_ids"] == ids, "it adds nothing by itself"


def test_building_it_again_gives_the_same_one() -> None:
    tokenizer, again = pico_tokenizer(), build_tokenizer()
    assert tokenizer.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert (again.pad_token, again.eos_token, again.padding_side) == (PAD, END, "left")
    assert again.pad_token_id != again.eos_token_id


def test_invented_words_fall_apart_into_their_syllables() -> None:
    for words in (key_words("train"), key_words("eval"), entity_names()):
        for before in ("", " "):
            encoded = pico_tokenizer()([before + word for word in words])["input_ids"]
            for word, ids in zip(words, encoded, strict=True):
                pieces = [pico_tokenizer().decode([i]) for i in ids if pico_tokenizer().decode([i]) != " "]
                syllables = [word[i : i + 2] for i in range(0, len(word), 2)]
                assert [piece.strip() for piece in pieces] == syllables
