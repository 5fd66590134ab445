"""The recipe: defaults, refusals that name the field, overrides, round trip."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import ValidationError

from surgery.errors import RecipeError
from surgery.recipe import (
    AnalysisRecipe,
    PretrainRecipe,
    Recipe,
    check_recipe,
    load_any,
    load_recipe,
    shipped,
    to_yaml,
)
from tests.support.cases import each

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
MINIMAL = """
name: tiny
base:
  model: some/folder
train:
  sources:
    - task: kv_retrieval
      rows: 4
      weights: {answer: 1}
    - {task: sentence, rows: 2, weights: {base_kl: 1}}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    count = itertools.count()

    def write_file(text: str) -> Path:
        path = tmp_path / f"recipe{next(count)}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def assert_refused(path: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.hint
    return caught.value


@each(
    ("override", "field", "value"),
    [
        ("splicee=1", "splicee", "1"),
        ("locate.colour=red", "locate.colour", "'red'"),
        ("train.steps=0", "train.steps", "0"),
        ("train.steps=many", "train.steps", "'many'"),
        ("train.steps=1.5", "train.steps", "1.5"),
        ("seed=-1", "seed", "-1"),
        ("splice.mode=glue", "splice.mode", "'glue'"),
        ("train.optimizer.lr=-1e-3", "train.optimizer.lr", "-0.001"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr", "nan"),
        ("train.optimizer.lr=.inf", "train.optimizer.lr", "inf"),
        ("train.sources.0.weights.answer=-1", "train.sources.0.weights.answer", "-1"),
        ("train.sources.1.task=poetry", "train.sources.1.task", "'poetry'"),
        ("train.sources.0.pairs=[8,4]", "train.sources.0.pairs", "[8, 4]"),
        ("train.sources.0.pairs=[1,4]", "train.sources.0.pairs", "1"),
        ("train.sources.0.pairs=[4,101]", "train.sources.0.pairs", "101"),
        ("train.sources.0.split=1", "train.sources.0", "1"),
        ("train.sources.1.split=2", "train.sources.1.split", "2"),
        ("locate.pairs=1", "locate.pairs", "1"),
        ("train.sources.0.pairs=[4]", "train.sources.0.pairs", "[4]"),
        ("train.sources=[]", "train", "[]"),
        ("name=a/b", "name", "'a/b'"),
        ("name=..", "name", "'..'"),
        ("evaluate.pairs=[]", "evaluate.pairs", "[]"),
        ("export.dtype=int8", "export.dtype", "'int8'"),
        ("splice.state_size=0", "splice.state_size", "0"),
        ("splice.state_size=true", "splice.state_size", "True"),
        ("train.sources.0.weights.answer=[1.0]", "train.sources.0.weights.answer", "[1.0]"),
        ("name.a=1", "override", "name.a"),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(write: Write, override: str, field: str, value: str) -> None:
    error = assert_refused(write(MINIMAL), override)
    assert field in error.field
    assert value in str(error)


def test_a_missing_key_is_called_so(write: Write) -> None:
    error = assert_refused(write(MINIMAL.replace("  model: some/folder", "  revision: main")))
    assert error.field == "base.model"
    assert error.value == "missing"


def test_further_faults_are_counted_and_named(write: Write) -> None:
    error = assert_refused(write(MINIMAL), "seed=-1", "train.steps=0", "splice.mode=glue")
    assert "2 more" in str(error)
    for field in ("seed", "train.steps", "splice.mode"):
        assert field in str(error)


def test_the_cause_of_a_fault_comes_first(write: Write) -> None:
    """Unknown keys before the keys that they were meant for. A list is no fault of its own if one of its items is."""
    unknown = assert_refused(write(MINIMAL), "evaluate.tasks=[{tsak: kv_retrieval}]")
    assert unknown.field == "evaluate.tasks.0.tsak"
    assert str(unknown).endswith("(1 more: evaluate.tasks.0.task)")
    only = assert_refused(write(MINIMAL), "evaluate.tasks=[{task: kv_retrieval, pairs: x}]")
    assert str(only) == "evaluate.tasks.0.pairs: 'x'. It must be a list, such as [4, 8]"


def test_a_duplicate_key_further_in_is_refused(write: Write) -> None:
    assert "'rows'" in str(assert_refused(write(MINIMAL.replace("rows: 2,", "rows: 2, rows: 3,"))))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no_such.yaml" in str(assert_refused(tmp_path / "no_such.yaml"))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in str(assert_refused(tmp_path))


def test_overrides_reach_nested_keys_lists_and_absent_sections(write: Write) -> None:
    overrides = (
        "train.steps=7",
        "train.sources.0.rows=8",
        "locate.pairs=5",
        "splice.heads=[L1H2]",
        "splice.select=list",
    )
    recipe = load_recipe(write(MINIMAL), overrides)
    assert recipe.train.steps == 7
    assert [s.rows for s in recipe.train.sources] == [8, 2]
    assert recipe.locate.pairs == 5
    assert recipe.splice.heads == ("L1H2",)


def test_an_override_replaces_a_whole_list_entry(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL), ["train.sources.1={task: statement, rows: 3, weights: {lm: 1}}"])
    assert [s.task for s in recipe.train.sources] == ["kv_retrieval", "statement"]


@each("override", ["train.steps", "=5", "", "train.steps 5"])
def test_a_malformed_override_is_refused_with_the_form_that_would_do(write: Write, override: str) -> None:
    error = assert_refused(write(MINIMAL), override)
    assert repr(override) in str(error)
    assert "key.path=value" in error.hint


@each("part", ["2", "-1", "first", "²"])
def test_a_list_index_out_of_range_is_refused(write: Write, part: str) -> None:
    for override in (f"train.sources.{part}.rows=8", f"train.sources.{part}=8"):
        error = assert_refused(write(MINIMAL), override)
        assert str(error.value).startswith("train.sources.")
        assert "not an index of this list. Use 0 to 1" in error.hint


def test_an_override_below_a_plain_value_is_refused(write: Write) -> None:
    assert "inside a scalar" in assert_refused(write(MINIMAL), "name.a.b=1").hint


@each("text", ["1e-3", "1E-3", "0.001", "+1e-3", "1.0e-3", "1.e-3"])
def test_numbers_as_people_write_them_are_floats(write: Write, text: str) -> None:
    recipe = load_recipe(write(MINIMAL + f"  optimizer: {{lr: {text}}}\n"))
    assert recipe.train.optimizer.lr == 1e-3
    assert load_recipe(write(MINIMAL), [f"train.optimizer.lr={text}"]).train.optimizer.lr == 1e-3


def test_round_trip_through_yaml(write: Write) -> None:
    recipe = load_recipe(
        write(MINIMAL), ["seed=3", "train.optimizer.lr=3e-7", "splice={select: list, heads: [L0H1, L2H0]}"]
    )
    text = to_yaml(recipe)
    assert load_recipe(write(text)) == recipe
    assert to_yaml(load_recipe(write(text))) == text


def test_yaml_of_a_recipe_holds_every_default(write: Write) -> None:
    data = yaml.safe_load(to_yaml(load_recipe(write(MINIMAL))))
    assert list(data) == list(Recipe.model_fields)
    assert data["train"]["optimizer"]["warmup"] == 20


def test_pretrain_recipe_round_trip(write: Write) -> None:
    text = "name: p\nmodel: {hidden_size: 32}\ntrain: {sources: [{task: sentence, rows: 1, weights: {lm: 1}}]}\n"
    recipe = load_recipe(write(text), ["model.num_hidden_layers=2"], PretrainRecipe)
    assert (recipe.model.hidden_size, recipe.model.num_hidden_layers) == (32, 2)
    assert load_recipe(write(to_yaml(recipe)), kind=PretrainRecipe) == recipe


def test_one_kind_of_recipe_is_refused_as_the_other(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"recipe of `surgery run`, not of `surgery pretrain`: surgery run .*\.yaml"):
        load_recipe(write(MINIMAL), kind=PretrainRecipe)
    with pytest.raises(RecipeError, match=r"surgery analyse pico-reproduce$"):
        load_recipe("pico-reproduce")
    with pytest.raises(RecipeError, match="model"):  # no section: `base` was meant
        load_recipe(write("name: a\nmodel: some/folder\n"))
    fixed = load_recipe(write("name: a\nbase: {model: m}\n"), ["changes=[{name: a, disable: [L0H0]}]"], AnalysisRecipe)
    assert fixed.changes


def test_an_override_without_a_value_is_refused(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"train.steps: no value.*train.steps=null"):
        load_recipe(write(MINIMAL), ["train.steps="])
    assert load_recipe(write(MINIMAL), ["train.steps=null"]).train.steps is None


def test_errors_are_sentences(write: Write) -> None:
    """No cut section, and none of pydantic's own wording."""
    for override, says in (
        ("train.tokens=100", "train: set `steps` or `tokens`, not both"),
        ("train.optimizer.lr=5", "train.optimizer.lr: 5. It must be less than or equal to 1"),
        ("name=a/b", "name: 'a/b'. Use letters, digits, dots"),
        ("train.sources=[5]", "train.sources.0: 5. It must be a section with keys"),
        ("splice.heads=5", "splice.heads: 5. It must be a list, such as [L1H2]"),
        ("evaluate.tasks=[]", "evaluate.tasks: []. It must have at least 1 item, not 0"),
        ("train.sources=[{}]", "train.sources.0: {}. set either `task` (a probe) or `data`"),
    ):
        assert str(assert_refused(write(MINIMAL), "train.steps=5", override)).startswith(says)


def test_recipes_are_frozen(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL))
    for section, name in ((recipe, "seed"), (recipe.train, "steps"), (recipe.train.sources[0].weights, "answer")):
        with pytest.raises(ValidationError):
            setattr(section, name, 1)


def with_splice(**splice: Any) -> Recipe:
    data = yaml.safe_load(MINIMAL)
    return check_recipe({**data, "splice": splice})


@each(
    "splice",
    [
        {"select": "list"},
        {"select": "list", "heads": []},
        {"select": "list", "heads": ["L1H2", "L0H3"], "num_heads": 3},
        {"select": "sharpen", "heads": ["L1H2"]},
        {"heads": ["L1H2"]},
        {"select": "list", "heads": ["L1H2", "L1H2"]},
        {"select": "list", "heads": ["1.2"]},
    ],
)
def test_listed_heads_without_select_list_and_the_reverse_are_refused(splice: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="splice"):
        with_splice(**splice)


def test_checking_does_not_change_the_data() -> None:
    data = yaml.safe_load(MINIMAL)
    check_recipe(data)
    assert data == yaml.safe_load(MINIMAL)


@each("path", RECIPES)
def test_every_shipped_recipe_is_valid(path: Path, write: Write) -> None:
    recipe = load_any(path)
    assert load_any(write(to_yaml(recipe))) == recipe


@each(
    ("splice", "says"),
    [
        ("{init: teacher}", "init: teacher` needs `teacher`"),
        ("{teacher: {model: a/b}}", "init: ssm` does not use `teacher`"),
        ("{init: teacher, teacher: {model: a/b}, unit: layer}", "mode: replace"),
        ("{init: teacher, teacher: {model: a/b}, with_block: true}", "unit: layer"),
        ("{init: teacher, teacher: {model: a/b, donors: {L1H1: head}}}", "L<layer>H<head>"),
    ],
)
def test_transplants_that_mean_nothing_are_refused(splice: str, says: str, write: Write) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(write(MINIMAL + f"splice: {splice}\n"))


@each(("select", "needed"), [("ablation", "ablation"), ("gather", "context")])
def test_what_is_not_measured_cannot_choose(select: str, needed: str, write: Write) -> None:
    text = MINIMAL + f"splice: {{select: {select}}}\nlocate: {{methods: [query, sharpen%s]}}\n"
    hint = "Add it, or set splice.select to aggregate or sharpen"
    with pytest.raises(RecipeError, match=f"{select} needs {needed} in locate.methods. {hint}"):
        load_recipe(write(text % ""))
    assert load_recipe(write(text % f", {needed}")).splice.select == select


@each(
    ("locate", "says"),
    [
        ("{methods: []}", "at least 1"),
        ("{methods: [sharpen, sharpen]}", "twice"),
        ("{methods: [sharpness]}", "sharpen"),
        ("{methods: [gates]}", "Unknown locating method. Add bench.plugins.trials to `plugins`, and set PYTHONPATH"),
        ("{task: common_words}", "Unknown task. Add bench.plugins.ruler to `plugins`"),
        ("{gates: {steps: 2}}", "Did you mean locate.method_options"),
        ("{search: {risk: 0}}", "greater than 0"),
        ("{fill: mean, examples: 33}", "batch_size"),
        ("{fill: mean, batch_size: 1}", "batch_size"),
        ("{where: nowhere}", "everywhere"),
        ("{fill: noise}", "resample"),
    ],
)
def test_measurements_that_mean_nothing_are_refused(locate: str, says: str, write: Write) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(write(MINIMAL + f"locate: {locate}\n"))


def test_a_hybrid_is_trained_further_with_a_control_if_one_is_named(write: Write) -> None:
    spliced, alone = load_recipe(write(MINIMAL)), load_recipe(write(MINIMAL + "splice: null\n"))
    beside = load_recipe(write(MINIMAL + "splice: null\ncontrol: {model: some/base}\n"))
    assert [recipe.has_control for recipe in (spliced, alone, beside)] == [True, False, True]
    assert (alone.splice, alone.teacher) == (None, None)
    assert load_recipe(write(to_yaml(beside))) == beside
    off = load_recipe(write(to_yaml(beside)), ["train.control=false"])
    assert not off.has_control
    error = assert_refused(write(MINIMAL + "control: {model: some/base}\n"))
    assert "splice: null" in error.hint


def test_the_shipped_recipe_is_the_one_of_the_checkout() -> None:
    path = shipped("finetune")
    assert path in RECIPES
    recipe = load_recipe(path)
    assert recipe.splice is None and recipe.train.sources[0].data is not None
    assert recipe.train.sources[0].data.holdout > 0, "what it learns is shown on rows that it was not trained on"
    with pytest.raises(RecipeError, match="installation is incomplete"):
        shipped("no-such-recipe")


class TestNotes:
    KV: ClassVar = {"task": "kv_retrieval", "rows": 2}

    def notes(self, weights: Mapping[str, float], splice: Mapping[str, Any] | None = None, **train: Any) -> str:
        sources = [{**self.KV, "weights": weights}]
        data = {"name": "mine", "base": {"model": "m"}, "train": {"sources": sources, **train}}
        return " ".join(check_recipe({**data, **({"splice": splice} if splice is not None else {})}).notes)

    def test_training_without_supervised_attention_gets_a_note(self) -> None:
        assert "attention: 1.0" in self.notes({"answer": 1.0}) and not self.notes({"answer": 1.0, "attention": 1.0})
        teacher = {"unit": "layer", "init": "teacher", "mode": "replace", "teacher": {"model": "t"}}
        assert not self.notes({"answer": 1.0}, teacher)

    @each(
        ("settings", "needs"),
        [({"lora": {"rank": 4}}, "trainable: lora"), ({"distil": {"temperature": 2.0}}, "base_kl"),
         ({"align": {"heads": {"L0H0": "L1H1"}}}, "a teacher's attention"),
         ({"align": {"layers": {0: 1}}, "teacher": {"model": "t"}}, "a teacher's attention")],
    )  # fmt: skip
    def test_settings_without_effect_get_a_note(self, settings: dict[str, Any], needs: str) -> None:
        name, weights = next(iter(settings)), {"answer": 1.0, "attention": 1.0}
        found = self.notes(weights | ({"distil": 1.0} if "teacher" in settings else {}), **settings)
        assert found.startswith(f"train.{name} has no effect without") and needs in found

    @each(
        ("settings", "says"),
        [
            ({"distil": {"cache": True, "top_k": 8}}, "train.distil.cache has no effect without a weight of `distil`"),
            ({"optimizer": {"lora_lr": 1e-3}}, "train.optimizer.lora_lr has no effect without `trainable: lora`"),
            ({"optimizer": {"warmup": 30}, "steps": 30}, "train.optimizer.warmup: 30, but training has 30 steps"),
        ],
    )
    def test_other_settings_without_effect(self, settings: dict[str, Any], says: str) -> None:
        assert self.notes({"answer": 1.0, "attention": 1.0, "base_kl": 1.0}, **settings).startswith(says)

    @each("path", RECIPES)
    def test_shipped_recipes_have_none(self, path: Path) -> None:
        recipe = load_any(path)
        assert not isinstance(recipe, Recipe) or recipe.notes == ()
