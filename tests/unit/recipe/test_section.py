"""Renamed keys: old recipes load with a warning, and hashes are made of the keys of version 0.1."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import ValidationError

from surgery.errors import RecipeError
from surgery.probes.registry import prompts_of
from surgery.recipe import Evaluate, Export, Locate, Recipe, Source, Splice, Train, Weights, load_recipe, to_yaml
from surgery.recipe.section import RenamedKeyWarning, Section, current_keys, current_path, keys_of_0_1
from surgery.testing.pico import pico_tokenizer

ROOT = Path(__file__).parents[3]
RECIPE_OF_0_1 = ROOT / "tests" / "support" / "recipe_0.1.0.yaml"
KV: dict[str, Any] = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0}}
TEACHER = {"model": "x"}
# The section that the key is in, its value, and what else the section needs.
OLD_KEYS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "keep": ("weights", "base_kl", 1.0, {}),
    "text": ("weights", "lm", [0.0, 2.0], {}),
    "reading": ("weights", "attention_kl", 0.5, {"teacher": TEACHER}),
    "mixing": ("weights", "attention_mse", 0.5, {"teacher": TEACHER}),
    "hidden": ("weights", "hidden_mse", 0.5, {"teacher": TEACHER}),
    "end": ("source", "train_eos", True, {}),
    "half": ("source", "split", 1, {"task": "closed_book"}),
    "trains": ("train", "trainable", "new_heads", {}),
    "no_splice": ("train", "control", False, {}),
}


def train_with(key: str, value: Any, place: str, more: dict[str, Any]) -> dict[str, Any]:
    """A section `train` with one more key in one of its sections."""
    data: dict[str, Any] = {"steps": 3, "sources": [copy.deepcopy(KV)]}
    places = {"weights": data["sources"][0]["weights"], "source": data["sources"][0], "train": data}
    places["source" if "task" in more else "train"].update(more)
    places[place][key] = value
    return data


def test_every_renamed_key_is_tested() -> None:
    assert {**Weights.renamed, **Source.renamed, **Train.renamed} == {
        old: new for old, (_, new, *_) in OLD_KEYS.items()
    }


@pytest.mark.parametrize("old", OLD_KEYS)
def test_an_old_key_means_the_same_with_one_warning_that_names_both(old: str) -> None:
    place, new, value, more = OLD_KEYS[old]
    with pytest.warns(RenamedKeyWarning, match=rf"\.{old} has been renamed to \S+\.{new}\. ") as caught:
        section = Train.model_validate(train_with(old, value, place, more))
    assert len(caught) == 1 and issubclass(caught[0].category, DeprecationWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert section == Train.model_validate(train_with(new, value, place, more))


@pytest.mark.parametrize("old", OLD_KEYS)
def test_both_names_at_once_are_refused(old: str) -> None:
    place, new, value, more = OLD_KEYS[old]
    data = train_with(old, value, place, more)
    places = {"weights": data["sources"][0]["weights"], "source": data["sources"][0], "train": data}
    places[place][new] = value
    with pytest.raises(ValueError, match=f"`{old}` is the old name of `{new}`, and both are set. Remove `{old}`"):
        Train.model_validate(data)


@pytest.mark.parametrize("in_file", ["old", "new"])
@pytest.mark.parametrize("given", ["old", "new"])
def test_an_override_replaces_the_value_whatever_name_both_use(tmp_path: Path, in_file: str, given: str) -> None:
    names = {"old": ("no_splice", "keep", "half"), "new": ("control", "base_kl", "split")}
    control, kl, split = names[in_file]
    train = {"steps": 2, control: True, "sources": [{"task": "sentence", "rows": 1, split: 0, "weights": {kl: 1.0}}]}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "base": {"model": "b"}, "train": train}))
    control, kl, split = names[given]
    overrides = [f"train.{control}=false", f"train.sources.0.weights.{kl}=3", f"train.sources.0.{split}=1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_recipe(path, overrides).train
    assert (loaded.control, loaded.sources[0].split) == (False, 1)
    assert loaded.sources[0].weights.at(0.5) == {"base_kl": 3.0}


def test_both_names_in_a_file_are_refused(tmp_path: Path) -> None:
    source = {"task": "sentence", "rows": 1, "weights": {"keep": 1.0, "base_kl": 1.0}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "base": {"model": "b"}, "train": {"sources": [source]}}))
    with pytest.raises(RecipeError, match=r"train\.sources\.0\.weights: .*old name of `base_kl`"):
        load_recipe(path)


def test_what_is_written_has_the_present_names() -> None:
    with pytest.warns(RenamedKeyWarning):
        written = to_yaml(load_recipe(RECIPE_OF_0_1))
    assert {"no_splice:", "trains:", "half:"} <= set(RECIPE_OF_0_1.read_text().split())
    assert not {"no_splice:", "trains:", "half:", "keep:"} & set(written.split())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recipe.model_validate(yaml.safe_load(written))


def test_hashes_are_made_of_what_version_0_1_wrote() -> None:
    """Version 0.1 wrote every default into the recipe of an export."""
    with pytest.warns(RenamedKeyWarning):
        recipe = load_recipe(RECIPE_OF_0_1, ("splice.min_width=null",))
    stored = yaml.safe_load(RECIPE_OF_0_1.read_text())
    assert keys_of_0_1(Train, recipe.train.model_dump(mode="json")) == stored["train"]
    assert keys_of_0_1(Locate, recipe.locate.model_dump(mode="json")) == stored["locate"]
    assert keys_of_0_1(Splice, recipe.splice.model_dump(mode="json")) == stored["splice"], "the default was sharpen"


def test_hashes_of_an_export_know_no_format_but_another_one() -> None:
    """Version 0.1 had no `export.format`: its finished exports stay finished."""
    with pytest.warns(RenamedKeyWarning):
        export = load_recipe(RECIPE_OF_0_1).export
    stored = yaml.safe_load(RECIPE_OF_0_1.read_text())["export"]
    assert keys_of_0_1(Export, export.model_dump(mode="json")) == stored
    assert keys_of_0_1(Export, {**stored, "format": "gguf"}) == {**stored, "format": "gguf"}


class Inner(Section):
    path_in_recipe: ClassVar[str] = "outer.inner"
    renamed: ClassVar[dict[str, str]] = {"old": "new"}
    new: int = 0


class Outer(Section):
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    free: dict[str, int] = {}


def test_keys_are_renamed_at_every_depth_and_nowhere_else() -> None:
    data = {"inner": {"old": 1}, "several": [{"old": 2}, {"new": 3}], "free": {"old": 4}}
    with pytest.warns(RenamedKeyWarning):
        current = current_keys(Outer, data)
    assert current == {"inner": {"new": 1}, "several": [{"new": 2}, {"new": 3}], "free": {"old": 4}}
    assert keys_of_0_1(Outer, current) == {**data, "several": [{"old": 2}, {"old": 3}]}
    with pytest.warns(RenamedKeyWarning, match=r"outer\.inner\.old has been renamed to outer\.inner\.new"):
        assert current_path(Outer, "several.1.old") == "several.1.new"
    assert current_path(Outer, "free.old") == "free.old" and current_path(Outer, "a.b.0") == "a.b.0"


def test_a_recipe_is_validated_without_torch() -> None:
    """Objectives are described by their classes, which import torch when they compute."""
    code = (
        "import sys, surgery.recipe as r\n"
        "loaded = r.load_recipe('recipes/quickstart.yaml')\n"
        "assert loaded.train.needs == {'answers', 'gold_positions', 'model.attention', 'base.logits'}\n"
        "assert 'base_kl' in str(r.Recipe.model_json_schema())\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class TestPairs:
    """`pairs` is one number in `locate`, a range in a source, a list in an evaluation. One number fits all three."""

    def test_one_number_fits_everywhere(self) -> None:
        assert Locate.model_validate({"pairs": 8}).pairs == 8
        assert Source.model_validate({**KV, "pairs": 8}) == Source.model_validate({**KV, "pairs": [8, 8]})
        evaluate = Evaluate.model_validate({"pairs": 8, "tasks": [{"task": "records", "pairs": 4}]})
        assert (evaluate.pairs, evaluate.tasks[0].pairs) == ((8,), (4,))

    @pytest.mark.parametrize(
        ("kind", "pairs", "hint"),
        [
            (Locate, [4, 8], "Use one number"),
            (Source, [4, 8, 16], r"a range \[low, high\]"),
            (Source, [4], r"a range \[low, high\]"),
            (Source, True, "integer|tuple"),
            (Evaluate, "8", "tuple"),
        ],
    )
    def test_another_form_is_refused_with_the_right_one(self, kind: type[Section], pairs: Any, hint: str) -> None:
        with pytest.raises(ValidationError, match=hint):
            kind.model_validate({**(KV if kind is Source else {}), "pairs": pairs})


class TestLocatedTask:
    def test_the_sizes_are_those_of_the_probe(self) -> None:
        section = Locate(task="phonebook", pairs=8, value_digits=(3, 3))
        (document,) = prompts_of(section.probe, "locate", 0, 1, section.options(tokenizer=pico_tokenizer()))
        assert document.task == "phonebook" and len(document.questions[0].choices) == 8

    @pytest.mark.parametrize(
        ("more", "hint"),
        [
            ({"task": "closed_book"}, "Unknown task"),
            ({"task": "key_echo"}, "Unknown task"),
            ({"task": "mqar", "filler": [0, 1]}, "mqar does not use `filler`"),
            ({"task": "phonebook", "pairs": 95}, "2 to 90"),
            ({"task": "records", "methods": ["hidden_attention"]}, "hidden_attention needs `task: kv_retrieval`"),
        ],
    )
    def test_what_cannot_be_located_is_refused(self, more: dict[str, Any], hint: str) -> None:
        with pytest.raises(ValidationError, match=hint):
            Locate.model_validate(more)
