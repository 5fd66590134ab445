"""`splice.form`: its defaults, what goes with it, and hashes that do not change."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.errors import RecipeError
from surgery.recipe import Recipe, Splice, to_yaml
from surgery.recipe.loading import check_recipe
from surgery.recipe.yaml import load_yaml
from tests.support.cases import each

KV = {"task": "kv_retrieval", "pairs": [4, 8], "rows": 2, "weights": {"answer": 1.0, "attention": 1.0}}


def recipe(form: str | None = "pair", **more: Any) -> Recipe:
    splice = {**({"form": form} if form else {}), **more.pop("splice", {})}
    train = {"sources": [KV], **more.pop("train", {})}
    return check_recipe({"name": "x", "base": {"model": "m"}, "splice": splice, "train": train, **more})


@each("form", ["block", "pair"])
def test_init_and_export_format_follow_the_form(form: str) -> None:
    made = recipe(form)
    assert made.splice is not None and made.splice.init == "random" and made.export.format == "nemotron_h"
    assert recipe(form, export={"dtype": "bfloat16"}).export.format == "nemotron_h"
    assert Recipe(name="x", base={"model": "m"}, splice=Splice(form=form), train={"sources": [KV]}) == made
    assert check_recipe(load_yaml(to_yaml(made))) == made


def test_a_pair_may_begin_with_copies() -> None:
    made = recipe("pair", splice={"init": "ssm"})
    assert made.splice is not None and (made.splice.init, made.splice.min_width) == ("ssm", None)
    assert check_recipe(load_yaml(to_yaml(made))) == made


@each(
    ("more", "words"),
    [
        ({"splice": {"init": "teacher"}}, ("init: teacher", "init: random", "init: ssm")),
        ({"splice": {"form": "block", "init": "ssm"}}, ("init: ssm", "init: random")),
        ({"splice": {"init": "ssm", "side_channels": 0}}, ("init: ssm", "side_channels")),
        ({"splice": {"mode": "replace"}}, ("mode: replace", "mode: add")),
        ({"splice": {"state_size": 4}}, ("state_size", "form: head")),
        ({"splice": {"min_width": 32}}, ("min_width",)),
        ({"splice": {"before": -1}}, ("before",)),
        ({"splice": {"before": True}}, ("before",)),
        ({"splice": {"head_dim": 0}}, ("head_dim",)),
        ({"splice": {"form": "rows"}}, ("form",)),
        ({"export": {"format": "transformers"}}, ("export.format: nemotron_h",)),
        ({"train": {"trainable": "lora"}}, ("trainable: lora", "new_heads")),
        ({"train": {"trainable": "spliced_layers"}}, ("trainable: spliced_layers",)),
        ({"train": {"compile": True}}, ("train.compile",)),
        (
            {
                "train": {
                    "sources": [{**KV, "weights": {"hidden_mse": 1.0}}],
                    "teacher": {"model": "t"},
                }
            },
            ("hidden_mse", "model.hidden_states"),
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(more: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**more)
    for word in words:
        assert word in str(caught.value), caught.value


@each("key", ["before", "head_dim"])
def test_keys_of_inserted_layers_need_the_form(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"`{key}` needs `form: block`"):
        recipe(None, splice={key: 1})


def test_the_format_needs_the_form() -> None:
    with pytest.raises(RecipeError, match=r"needs splice\.form block or pair"):
        recipe(None, export={"format": "nemotron_h"})
