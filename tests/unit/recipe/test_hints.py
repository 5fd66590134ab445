"""Hints of errors: keys that were meant, and examples that are valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from surgery.recipe import AnalysisRecipe, PretrainRecipe, Recipe
from surgery.recipe.hints import example_at, meant
from surgery.recipe.section import Section, section_of
from tests.support.cases import each

Place = tuple[str | int, ...]


@each(
    ("key", "proposed"),
    [
        ("lr", "train.optimizer.lr"),
        ("train.learning_rate", "train.optimizer.lr"),
        ("train.stages.1.lr", "train.stages.1.optimizer.lr"),
        ("batch_size", "train.sources.0.rows or locate.batch_size or evaluate.batch_size"),
        ("pairs", "locate.pairs or evaluate.pairs"),
        ("train.sources.2.data.answer_span", "train.sources.2.data.columns.answer_span"),
        ("locate.tasks", "locate.task or evaluate.tasks"),
        ("num_head", "splice.num_heads"),
        ("evaluate.tasks.3.fillers", "evaluate.tasks.3.filler"),
    ],
)
def test_the_whole_key_that_was_meant_is_proposed(key: str, proposed: str) -> None:
    place = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    assert meant(Recipe, place) == f" Did you mean {proposed}?"


def test_nothing_is_proposed_for_a_key_that_resembles_none() -> None:
    assert meant(Recipe, ("epochs",)) == meant(Recipe, ("locate", "colour")) == ""
    assert meant(AnalysisRecipe, ("lr",)) == "" and "train.optimizer.lr" in meant(PretrainRecipe, ("lr",))


def fields(section: type[Section], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every key of a recipe with its type."""
    for name, field in section.model_fields.items():
        yield (*above, name), field.rebuild_annotation()
        inner = section_of(section, name)
        if inner is not None:
            is_list = str(field.annotation).startswith("tuple")
            yield from fields(inner, (*above, name, 0) if is_list else (*above, name))


@each("kind", [Recipe, PretrainRecipe, AnalysisRecipe])
def test_every_list_and_section_has_an_example_that_is_valid(kind: type[Section]) -> None:
    for place, annotation in fields(kind):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(annotation).validate_python(object())
        text = example_at(kind, place, object()).removeprefix(", such as ")
        if text:
            TypeAdapter(annotation).validate_python(yaml.safe_load(text))
        else:
            faults = {fault["type"] for fault in caught.value.errors()}
            assert not faults & {"tuple_type", "dict_type", "model_type"}, place
