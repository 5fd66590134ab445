"""Hints of errors: keys that were meant, and examples that are valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from surgery.errors import RecipeError
from surgery.recipe import AnalysisRecipe, PretrainRecipe, Recipe, check_recipe
from surgery.recipe.hints import example_at, meant
from surgery.recipe.section import Section, section_of
from tests.support.cases import each

BASE = {"name": "x", "base": {"model": "some/folder"}}
Place = tuple[str | int, ...]


def at(key: str) -> Place:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@each(
    ("key", "proposed"),
    [
        ("lr", "train.optimizer.lr"),
        ("train.lr", "train.optimizer.lr"),
        ("train.learning_rate", "train.optimizer.lr"),
        ("train.stages.1.lr", "train.stages.1.optimizer.lr"),
        ("train.batch_size", "train.sources.0.rows"),
        ("batch_size", "train.sources.0.rows or locate.batch_size or evaluate.batch_size"),
        ("steps", "train.steps"),
        ("pairs", "locate.pairs or evaluate.pairs"),
        ("model", "base.model"),
        ("train.weights", "train.sources.0.weights"),
        ("train.sources.2.data.answer_span", "train.sources.2.data.columns.answer_span"),
        ("locate.tasks", "locate.task or evaluate.tasks"),
        ("splice.num_head", "splice.num_heads"),
        ("num_head", "splice.num_heads"),
        ("evaluate.tasks.3.fillers", "evaluate.tasks.3.filler"),
    ],
)
def test_the_whole_key_that_was_meant_is_proposed(key: str, proposed: str) -> None:
    assert meant(Recipe, at(key)) == f" Did you mean {proposed}?"


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
    missing, schema = [], kind.model_json_schema()
    for place, annotation in fields(kind):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(annotation).validate_python(object())
        text = example_at(schema, place, object()).removeprefix(", such as ")
        if text:
            TypeAdapter(annotation).validate_python(yaml.safe_load(text))
        elif {fault["type"] for fault in caught.value.errors()} & {"tuple_type", "dict_type", "model_type"}:
            missing.append(place)
    assert missing == []


@each(
    ("data", "message"),
    [
        ({"evaluate": {"pairs": "4-8"}}, "evaluate.pairs: '4-8'. It must be a list, such as [4, 8]"),
        ({"base": "my/model"}, "base: 'my/model'. It must be a section with keys, such as {model: my/model}"),
        ({"locate": {"filler": 5}}, "locate.filler: 5. It must be a list, such as [0, 20]"),
        ({"train": {"sources": [5]}}, "train.sources.0: 5. It must be a section with keys, such as {task: kv_"),
        ({"train": {"align": {"heads": 5}}}, "train.align.heads: 5. It must be a section with keys, such as {L17H3"),
    ],
)
def test_where_a_list_or_a_section_is_required_the_error_has_an_example(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe({**BASE, **data})
    assert str(caught.value).startswith(message)


def test_one_name_stands_for_a_list_of_one() -> None:
    recipe = check_recipe({
        **BASE, "locate": {"methods": "query"}, "splice": {"select": "list", "heads": "L1H2"},
        "evaluate": {"tasks": "kv_retrieval", "generate": "kv_retrieval"}, "train": {"trackers": "tensorboard"},
    })  # fmt: skip
    assert (recipe.locate.methods, recipe.splice and recipe.splice.heads) == (("query",), ("L1H2",))
    assert [task.task for task in recipe.evaluate.tasks] == list(recipe.evaluate.generate) == ["kv_retrieval"]  # type: ignore[arg-type]
    assert recipe.train.trackers == ("tensorboard",)
    task = check_recipe({**BASE, "evaluate": {"tasks": {"task": "phonebook", "pairs": 8}}}).evaluate.tasks[0]
    assert (task.task, task.pairs) == ("phonebook", (8,))
