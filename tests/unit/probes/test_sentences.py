"""Templated sentences."""

from __future__ import annotations

import re

from surgery.probes.documents import rng_of
from surgery.probes.sentences import TEMPLATES, sentence
from tests.support.cases import each


def texts(split: str, count: int = 300) -> list[str]:
    rng = rng_of("sentences", split)
    return [sentence(rng, split).text for _ in range(count)]


@each("split", ["train", "eval"])
def test_sentences_are_finished(split: str) -> None:
    for text in texts(split):
        assert re.fullmatch(r"[A-Z][a-z]*(,? [a-z]+)+\.", text), text


def test_sentences_of_the_splits_are_disjoint() -> None:
    assert not set(texts("train")) & set(texts("eval"))


def test_sentences_differ_and_use_every_template() -> None:
    made = texts("train")
    assert len(set(made)) > 0.9 * len(made)
    for template in TEMPLATES:
        pattern = re.compile(re.sub(r"\{\w+\}", "[a-z]+", re.escape(template).replace(r"\{", "{").replace(r"\}", "}")))
        assert any(pattern.fullmatch(text) for text in made), template


def test_sentences_are_seeded_and_ask_nothing() -> None:
    one, again, other = (sentence(rng_of("seed", s)) for s in (1, 1, 2))
    assert one == again
    assert one != other
    assert one.questions == ()
    assert one.task == "sentence"
