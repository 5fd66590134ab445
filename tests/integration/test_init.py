"""`surgery init` and `surgery run --base`: bases that retrieve, bases at chance, formats of files, what is refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest

from surgery.commands.init import recipe_of_base
from surgery.errors import ModelError, PlanError, SurgeryError
from surgery.models.loading import load_model
from surgery.recipe import Base, Recipe, check_recipe, load_recipe
from surgery.recipe.yaml import load_yaml
from surgery.run import measuring
from surgery.run.initial_recipe import write_recipe
from surgery.run.measuring import measure_base
from surgery.run.pipeline import run_pipeline
from surgery.run.probing import ADJACENT, Prober, Screening, screen
from tests.integration.conftest import EXPORT, PICO_MAMBA2
from tests.support.mamba_ssm_files import config_of, write
from tests.support.pico import pico_family, pico_tokenizer


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format and few prompts."""

    def one_format(prober: Prober, count: int) -> Screening:
        return screen(prober, count, (ADJACENT,))

    monkeypatch.setattr(measuring, "screen", one_format)
    monkeypatch.setattr(measuring, "PROMPTS_OF_SMALL", 24)
    monkeypatch.setattr(measuring, "_KNOWLEDGE", ())


def recipe_for(folder: Path) -> Recipe:
    text = write_recipe(measure_base(str(folder), None, None, False, lambda line: None), lambda line: None)
    return check_recipe(load_yaml(text))


def family_folder(name: str, folder: Path) -> Path:
    pico_family(name, vocab_size=1024).save_pretrained(folder)
    copy.deepcopy(pico_tokenizer()).save_pretrained(folder)
    return folder


def shortened(recipe: Recipe) -> Recipe:
    """The recipe with little of everything, to run in seconds."""
    data = recipe.model_dump(mode="json")
    data["locate"] |= {"examples": 8, "methods": ["patching", "sharpen"]}
    data["train"] |= {"steps": 2}
    data["evaluate"] |= {"examples": 8, "sentences": 8}
    for source in data["train"]["sources"]:
        source["rows"] = 2
    return check_recipe(data)


def test_families_get_a_recipe_that_runs(tmp_path: Path) -> None:
    for name in ("mamba", "llamba", "zamba2"):
        recipe = recipe_for(family_folder(name, tmp_path / name))
        assert recipe.splice is not None and recipe.splice.select == "random", name  # random weights are at chance
        if name == "zamba2":
            run_pipeline(shortened(recipe), tmp_path / "run", last="train")
            assert (tmp_path / "run" / "trained").is_dir()


def test_a_base_in_the_format_of_mamba_ssm_is_located_and_spliced(tmp_path: Path) -> None:
    """The shipped base, rewritten. Its tokenizer is next to it."""
    model = load_model(Base(model=str(PICO_MAMBA2)))
    config = {**config_of(model), "vocab_size": model.config.vocab_size, "pad_vocab_size_multiple": 1}
    folder = write(tmp_path / "theirs", model, config=config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO_MAMBA2 / file, folder)
    recipe = recipe_for(folder)
    assert recipe.splice is not None and recipe.splice.select == "patching"
    assert recipe.train.sources[0].weights.uses("attention")
    run_pipeline(shortened(recipe), tmp_path / "run", last="splice")
    assert (tmp_path / "run" / "spliced" / "config.json").is_file()


def test_run_with_a_base_writes_its_recipe_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(family_folder("mamba2", tmp_path / "mine"))

    def path_of(data: str | None = None, tokenizer: str | None = None, trust: bool = False) -> Path:
        return recipe_of_base(base, data, tokenizer, trust, tmp_path / "runs", overwrite=False)

    assert path_of() == tmp_path / "runs" / "mine.yaml" and load_recipe(path_of()).base.model == base
    captured = capsys.readouterr()
    assert "written before" in captured.err and captured.out == ""
    for other in ({"data": "mine.jsonl"}, {"tokenizer": base}, {"trust": True}):
        with pytest.raises(SurgeryError, match="of another base, tokenizer or data"):
            path_of(**other)  # type: ignore[arg-type]


def test_what_is_no_base_is_refused_with_what_to_do(tmp_path: Path) -> None:
    pico_family("mamba2", vocab_size=1024).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer.*--tokenizer"):
        recipe_for(tmp_path)
    with pytest.raises(PlanError, match="surgery finetune"):
        recipe_for(EXPORT)
