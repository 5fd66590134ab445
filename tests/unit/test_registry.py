"""Registries: names, errors, plugins."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ValidationError

from surgery import registry as module
from surgery.errors import RecipeError, RunError, SurgeryError
from surgery.recipe import load_recipe
from surgery.registry import NameOf, Registry, load_plugins, plugin_errors


@pytest.fixture
def registry() -> Registry[Any]:
    colours: Registry[Any] = Registry("colour")
    colours.register("red", str)
    colours.register("green", int)
    return colours


def test_an_unknown_name_is_answered_with_the_nearest(registry: Registry[Any]) -> None:
    with pytest.raises(RecipeError, match=r"colour: gren. Did you mean green\? Known: red, green"):
        registry["gren"]


def test_a_name_is_registered_once(registry: Registry[Any]) -> None:
    registry.register("red", str)  # the same again, as a reload does
    with pytest.raises(RecipeError, match=r"builtins.str has this name already. Register builtins.float under another"):
        registry.register("red", float)
    assert registry["red"] is str


def test_our_modules_are_imported_when_the_registry_is_read_or_a_plugin_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("planted_read", "planted_taken"):
        (tmp_path / f"{name}_ours.py").write_text(f"from {name} import R\nR.register('late', dict)\n")
        code = f"from surgery.registry import Registry\nR = Registry('thing', ['{name}_ours'])\n"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        entries = import_module(name).R
        assert f"{name}_ours" not in sys.modules
        if name == "planted_taken":
            with pytest.raises(RecipeError, match=r"builtins.dict has this name already. Register builtins.float"):
                entries.register("late", float)
        assert list(entries) == ["late"] and entries["late"] is dict


def test_a_field_takes_the_names_of_that_time_that_fit_and_the_extra_ones(registry: Registry[Any]) -> None:
    class Form(BaseModel):
        colour: Annotated[str, NameOf(registry, extra=("none",), keep=lambda entry: entry is not int)]

    assert Form.model_json_schema()["properties"]["colour"]["enum"] == ["red", "none"]
    for wrong in ("blue", "green"):
        with pytest.raises(ValidationError, match=r"Unknown colour\..*Use one of: red, none"):
            Form(colour=wrong)
    registry.register("blue", float)
    for name in ("blue", "none"):
        assert Form(colour=name).model_dump() == {"colour": name}


class TestPlugins:
    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(module, "_LOADED", set())
        return tmp_path

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, r"plugins: planted_bad. No module of this name is on the import path"),
            ("import nowhere_at_all", r"plugins: planted_bad. It imports nowhere_at_all, which is not installed"),
            ("1 / 0", r"plugins: planted_bad. Importing it failed: ZeroDivisionError: division by zero"),
            ("import sys; sys.exit('no GPU')", r"plugins: planted_bad. Importing it failed: SystemExit: no GPU"),
            ("raise ModuleNotFoundError('gone')", r"Importing it failed: ModuleNotFoundError: gone"),
        ],
    )
    def test_what_cannot_be_imported_is_refused(self, folder: Path, text: str | None, message: str) -> None:
        sys.modules.pop("planted_bad", None)
        if text is not None:
            (folder / "planted_bad.py").write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_plugins(["planted_bad"])

    def test_a_token_in_their_place_is_not_repeated(self, folder: Path) -> None:
        token = "hf_" + 34 * "a"
        (folder / "recipe.yaml").write_text(f"name: x\nplugins: [{token}]\nbase: {{model: m}}\n")
        with pytest.raises(RecipeError, match=r"plugins\.0: a token \(Hugging Face") as caught:
            load_recipe(folder / "recipe.yaml")
        assert token not in str(caught.value)

    @pytest.mark.parametrize("value", ["../evil", "a b", "os; x", "evil.py/"])
    def test_a_path_is_no_module(self, folder: Path, value: str) -> None:
        (folder / "recipe.yaml").write_text(f"name: x\nplugins: ['{value}']\nbase: {{model: m}}\n")
        with pytest.raises(RecipeError, match="plugins"):
            load_recipe(folder / "recipe.yaml")


class TestPluginErrors:
    def test_an_error_has_the_name_and_the_place_of_the_plugin(self) -> None:
        def outside() -> None:
            {}["red"]

        with (
            pytest.raises(SurgeryError, match=r"^colour red: KeyError: 'red'. .*test_registry.py, line \d+. `surgery"),
            plugin_errors("colour red", outside),
        ):
            outside()

    @pytest.mark.parametrize("error", [RunError("red", 1, "Use 2."), OSError("full"), MemoryError("full")])
    def test_other_errors_pass(self, error: Exception) -> None:
        with pytest.raises(type(error)) as raised, plugin_errors("colour red", str):
            raise error
        assert raised.value is error
