"""`KEY=VALUE,VALUE`: how it is split, which recipes and names follow, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from surgery.errors import RecipeError
from surgery.recipe.grid import Grid, _values_in, label_of_values, load_grid, naming
from surgery.recipe.loading import check_recipe
from tests.support.cases import each

SOURCE = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0}}
RECIPE: dict[str, Any] = {"name": "tiny", "base": {"model": "m"}, "train": {"steps": 3, "sources": [SOURCE]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path / "tiny.yaml"


def names(grid: Grid) -> list[str]:
    return [point.recipe.name for point in grid.points]


@each(
    ("text", "values"),
    [
        ("0,1, 2", (0, 1, 2)),
        ("[4, 8],[16]", ([4, 8], [16])),
        ("{a: 1, b: [2, 3]},null", ({"a": 1, "b": [2, 3]}, None)),
        ("'a,b',c", ("a,b", "c")),
        ("it's,that's", ("it's", "that's")),
    ],
)
def test_values_are_yaml_between_brackets(text: str, values: tuple[Any, ...]) -> None:
    assert _values_in("key", text) == values


def test_one_recipe_for_each_value(path: Path) -> None:
    grid = load_grid(path, ["splice.num_heads=1,4,2", "train.steps=9"])
    assert grid.name == "tiny"
    assert [point.values for point in grid.points] == [{"splice.num_heads": n} for n in (1, 4, 2)]
    assert [point.recipe.splice.num_heads for point in grid.points if point.recipe.splice] == [1, 4, 2]
    assert {point.recipe.train.steps for point in grid.points} == {9}
    assert names(grid) == ["tiny-splice.num_heads-1", "tiny-splice.num_heads-4", "tiny-splice.num_heads-2"]
    assert [recipe.splice.num_heads for recipe in grid.recipes if recipe.splice] == [4, 2, 1], "most heads first"


def test_two_keys_and_the_seed_give_the_grid(path: Path) -> None:
    grid = load_grid(path, ["splice.select=sharpen,random", "seed=0,1", "splice.num_heads=1,2"])
    assert len(grid.points) == len(set(names(grid))) == 8
    assert list(grid.axes) == ["splice.select", "seed", "splice.num_heads"]
    assert grid.points[1].values == {"splice.select": "sharpen", "seed": 0, "splice.num_heads": 2}
    assert (grid.points[-1].recipe.seed, grid.points[-1].recipe.splice.select) == (1, "random")  # type: ignore[union-attr]


def test_no_heads_are_the_control_of_the_run_with_the_same_other_values(path: Path) -> None:
    grid = load_grid(path, ["splice.num_heads=0,2,1", "train.steps=3,4"])
    controls = [point for point in grid.points if point.arm == "no_splice"]
    assert all([recipe.splice.num_heads for recipe in point.others] == [1] for point in controls)
    own = load_grid(path, ["splice.num_heads=0,2,1", "train.steps=3,4", "train.trainable=spliced_layers"])
    assert not any(point.others for point in own.points), "each control trains the layers of its own run"
    assert [point.values["splice.num_heads"] for point in grid.points] == [0, 0, 2, 2, 1, 1]
    assert [(p.recipe.splice.num_heads, p.recipe.train.steps) for p in controls if p.recipe.splice] == [(2, 3), (2, 4)]
    assert len(grid.recipes) == 4


def test_no_heads_are_the_base_if_only_new_heads_train(path: Path) -> None:
    grid = load_grid(path, ["splice.num_heads=0,1", "train.trainable=new_heads"])
    assert [point.arm for point in grid.points] == ["base", "hybrid"]


@each(
    ("words", "said"),
    [
        (["train.steps=3"], "sweep: No key has several values"),
        (["splice.num_heads=1,2", "splice.select"], "Use KEY=VALUE,VALUE"),
        (["splice.num_heads=1,2,1"], r"splice\.num_heads: 1\. The value is listed twice"),
        (["train.optimizer.lr=0.001,1e-3"], r"train\.optimizer\.lr: 0\.001\. The value is listed twice"),
        (["splice.num_heads=1,,2"], r"splice\.num_heads: '1,,2'\. A value is empty"),
        (["splice.num_heads=1,2", "splice.num_heads=3"], r"splice\.num_heads: set twice"),
        (["name=a,b"], "name: a,b. The runs of a sweep get their own names"),
        (["splice.num_heads=1,2", "train.steps=1,2", "train.optimizer.lr=0.1,0.2"], "At most 2 keys besides the seed"),
        (["splice.num_heads=1,-3"], r"splice\.num_heads: -3\."),
        (["splice.num_heads=1,many"], r"splice\.num_heads: 'many'\."),
        (["splice.num_headz=1,2"], r"splice\.num_headz: 1\. Unknown key"),
        (["splice.select=sharpen,list"], r"splice\.select=list: .*`select: list` needs `heads`"),
        (["splice.num_heads=1,2", "splice={select: list, heads: [L0H0, L0H1]}"], r"splice\.num_heads: 1\. .*lists 2"),
        (["splice.num_heads=1,[2"], r"splice\.num_heads: '1,\[2' .*not valid YAML"),
        (
            ["train.steps=400,50", "train.plateau={}", "train.optimizer.schedule=wsd"],
            r"train\.steps=50: train: .*`plateau` cannot end 50 steps early: .*or set `steps` to 140",
        ),
        (["splice.num_heads=0,1", "train.control=false"], r"splice\.num_heads: 0\. .*Set train\.control=true"),
    ],
)
def test_what_is_refused_names_key_and_value(path: Path, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_grid(path, words)


def test_a_missing_file_is_named_without_a_value(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^recipe: .*none\.yaml\. The file does not exist"):
        load_grid(tmp_path / "none.yaml", ["seed=0,1"])


def test_names_are_safe_for_folders_and_differ(path: Path) -> None:
    grid = load_grid(path, ["base.model=a/b,a-b,../c", "evaluate.pairs=[4],[4, 8]"])
    assert len(set(names(grid))) == 6
    assert all("/" not in name and len(name) < 130 for name in names(grid))
    for point in grid.points:
        check_recipe(point.recipe.model_dump(mode="json"))  # the name is one that a recipe may have
    assert names(load_grid(path, ["base.model=a/b,a-b"]))[0] == names(load_grid(path, ["base.model=x,a/b"]))[1]


def test_a_token_is_not_repeated(path: Path) -> None:
    token = "hf_" + "aBcDeFgHiJ" * 3 + "kLmN"
    with pytest.raises(RecipeError) as error:
        load_grid(path, [f"base.model=x,{token}"])
    assert token not in str(error.value)


def test_errors_of_other_fields_get_the_values() -> None:
    values = {"train.steps": 3, "splice.select": "random"}
    with (
        pytest.raises(RecipeError, match=r"^train\.steps=3, splice\.select=random: base\.model: m\. Gone"),
        naming(values),
    ):
        raise RecipeError("base.model", "m", "Gone.")
    with pytest.raises(RecipeError, match=r"^train\.steps: 3\. Less"), naming(values):
        raise RecipeError("train.steps", 3, "Less.")
    assert label_of_values({"a": [1, 2], "b": None, "c": True}) == "a=[1, 2], b=null, c=true"
