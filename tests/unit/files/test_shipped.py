"""Shipped recipes by name, shipped paths from any folder, and the commands that print and copy them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from surgery.cli import app
from surgery.errors import RecipeError, SurgeryError
from surgery.files import shipped
from surgery.files.shipped import close_models, local_path, shipped_files
from surgery.models.loading import load_config, load_model, revision_of
from surgery.recipe import Base, find_recipe, load_any, load_recipe
from surgery.recipe.grid import load_grid
from surgery.recipe.public import is_hub_id, public_name, public_recipe
from tests.support.cases import each

ROOT = Path(__file__).parents[3]
PICO = "checkpoints/pico-far"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: Path) -> Path:
    """The root of shipped files in a package that was installed elsewhere, from an empty current folder."""
    package = tmp_path / "site-packages" / "surgery"
    root = package / shipped.FOLDER
    for name in shipped_files(ROOT):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    monkeypatch.setattr(shipped, "__file__", str(package / "files" / "shipped.py"))
    return root


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/model") == str(tmp_path / "model")


class TestNames:
    def test_an_installed_package_is_read_first(self, installed: Path) -> None:
        assert find_recipe("quickstart") == installed / "recipes" / "quickstart.yaml"
        assert load_recipe("quickstart") == load_recipe(ROOT / "recipes" / "quickstart.yaml")
        assert load_any("pico-reproduce") == load_any(ROOT / "recipes" / "pico-reproduce.yaml")
        assert len(load_grid("quickstart", ["seed=0,1"]).points) == 2

    @each(
        ("name", "close"),
        [
            ("quikstart", "quickstart"),
            ("quickstart.yaml", "quickstart"),
            ("recipes/quickstart.yaml", "quickstart"),
            ("llamba-8b", "llamba-8b-head"),
            ("pico", "pico-reproduce"),
        ],
    )
    def test_an_unknown_name_lists_close_ones(self, empty: Path, name: str, close: str) -> None:
        with pytest.raises(RecipeError, match=rf"^recipe: {name}\. The file does not exist.*no shipped") as error:
            load_recipe(name)
        assert close in str(error.value).split("Did you mean ")[1]

    @each("name", ["zzz", "", ".", "../quickstart", "configs/README", "accelerate/ddp"])
    def test_only_recipes_have_names(self, empty: Path, name: str) -> None:
        with pytest.raises(RecipeError, match="no shipped recipe has this name") as error:
            find_recipe(name)
        assert "Did you mean" not in str(error.value) or "quickstart" in name


class TestModels:
    EXPORT = "checkpoints/quickstart/export"

    @each(
        ("name", "close"),
        [
            ("checkpoints/pico_far", [PICO]),
            ("pico-far", [PICO]),
            ("checkpoints/quickstart/exprt", [EXPORT]),
            ("quickstart", [EXPORT]),
            ("checkpoints/quickstart", [EXPORT]),
            ("other/pico-far", []),
            ("", []),
        ],
    )
    def test_shipped_models_of_a_similar_name(self, installed: Path, name: str, close: list[str]) -> None:
        assert close_models(name) == close


class TestPaths:
    @each("name", [PICO, f"./{PICO}", f"{PICO}/config.json", "checkpoints/quickstart/heads.json"])
    def test_a_shipped_path_is_found(self, installed: Path, name: str) -> None:
        assert Path(local_path(name)) == installed / name

    @each(
        "name",
        [
            *("", ".", "checkpoints", "checkpoints/pico-far2", "checkpoints/pico-far/no.bin", "runs/x/export"),
            *(
                "checkpoints/../checkpoints/pico-far",
                "/checkpoints/pico-far",
                "state-spaces/mamba2-130m",
                f"{PICO}@main",
            ),
        ],
    )
    def test_nothing_else_changes(self, empty: Path, name: str) -> None:
        assert local_path(name) == name

    def test_names_do_not_depend_on_the_place(self, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Revision, public name and stored name are those of a checkout, so a run folder is too."""

        def names() -> tuple[object, ...]:
            base = Base(model=PICO, tokenizer=PICO)
            model = load_model(base)
            recipe = load_recipe("quickstart", [f"base.tokenizer={PICO}"])
            return (
                revision_of(base), public_name(PICO), is_hub_id(PICO), load_config(base).to_diff_dict(),
                model.name_or_path, model.config.name_or_path, recipe, public_recipe(recipe),
            )  # fmt: skip

        elsewhere = names()
        monkeypatch.chdir(ROOT)
        assert elsewhere == names()
        assert elsewhere[1:3] == ("pico-far", False) and elsewhere[4] == PICO
        assert elsewhere[7].base.model == "pico-far"  # type: ignore[attr-defined]


class TestCommands:
    def run(self, *words: str) -> str:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    @each("name", ["quickstart", "mamba2-2.7b", "accelerate/fsdp2", "accelerate/deepspeed.json"])
    def test_a_recipe_is_printed_as_it_is(self, installed: Path, name: str) -> None:
        path = ROOT / "recipes" / (name if name.endswith(".json") else f"{name}.yaml")
        assert self.run("recipes", "show", name) == path.read_text(encoding="utf-8")

    def test_examples_are_copied_once(self, installed: Path, empty: Path) -> None:
        self.run("examples")
        copied = sorted(path.name for path in (empty / "examples").iterdir())
        assert copied == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
        (empty / "examples" / copied[-1]).write_text("# mine", encoding="utf-8")
        for name in copied[:-1]:
            (empty / "examples" / name).unlink()
        with pytest.raises(SurgeryError, match=rf"{copied[-1]}\. The file exists"):
            self.run("examples")
        assert [path.name for path in (empty / "examples").iterdir()] == copied[-1:]  # nothing was copied
        assert (empty / "examples" / copied[-1]).read_text(encoding="utf-8") == "# mine"

    def test_examples_are_not_written_through_a_link(self, installed: Path, empty: Path) -> None:
        name = min(path.name for path in (ROOT / "examples").glob("*.py"))
        (empty / "examples").mkdir()
        (empty / "examples" / name).symlink_to(empty / "nothing")
        (empty / "linked").symlink_to(empty / "nothing")
        for folder, place in (("examples", f"examples/{name}"), ("linked", "linked")):
            with pytest.raises(SurgeryError, match=rf"^FOLDER: {place}\. "):
                self.run("examples", folder)
        assert not (empty / "nothing").exists()
