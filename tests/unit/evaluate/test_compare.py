"""What `surgery compare` is given, and what it says of models side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.errors import ModelError, RecipeError
from surgery.evaluate import compare as comparison
from surgery.evaluate.compare import compare_models, load_comparison
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer

FEW = ("evaluate.pairs=[2]", "evaluate.examples=4", "evaluate.tasks=[kv_retrieval, perplexity]", "evaluate.sentences=3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for name in ("base", "hybrid"):
        folder = tmp_path_factory.mktemp("models") / name
        shape: dict[str, Any] = {"vocab_size": len(pico_tokenizer()), "layers": 2}
        (pico_base(**shape) if name == "base" else pico_hybrid([pico_site(1)], **shape)).save_pretrained(folder)
        pico_tokenizer().save_pretrained(folder)
        found.append(str(folder))
    return found


def test_a_change_leaves_the_other_defaults() -> None:
    loaded = load_comparison(["a", "b"], ["evaluate.pairs=[3]", "seed=4"])
    assert loaded.models == ("a", "b") and loaded.seed == 4
    assert loaded.evaluate.pairs == (3,) and loaded.evaluate.examples == 200


@pytest.mark.parametrize(
    ("models", "change", "field"),
    [
        ([], (), "models"),
        (["a", "b", "b/"], (), "models: .*b is listed twice"),
        (["a"], ("models=[b]",), "Give the models as arguments"),
        (["a"], ("evaluate.pears=[2]",), "evaluate.pears"),
        (["a"], ("plugins=[no_such_module]",), "plugins: no_such_module"),
        (["a"], ("evaluate.read_twice=true",), "^evaluate: `read_twice` adds arms"),
    ],
)
def test_what_cannot_be_meant_is_refused(models: list[str], change: tuple[str, ...], field: str) -> None:
    with pytest.raises(RecipeError, match=field):
        load_comparison(models, change)


def test_models_are_held_against_the_first(folders: list[str], tmp_path: Path) -> None:
    found = compare_models(load_comparison(folders, FEW), tmp_path / "out")
    assert list(found["arms"]) == ["base", "hybrid"] and not found["skipped"]
    assert set(found["comparisons"]) == {"hybrid"} and set(found["comparisons"]["hybrid"]) == {"base"}
    row = found["comparisons"]["hybrid"]["base"]["kv_retrieval/2"]
    accuracies = [found["arms"][name]["kv_retrieval"]["2"]["accuracy"] for name in ("hybrid", "base")]
    assert row["difference"] == pytest.approx(accuracies[0] - accuracies[1])
    recipe = json.loads((tmp_path / "out" / "results.json").read_text())["recipe"]
    assert recipe["models"] == ["base", "hybrid"] and recipe["evaluate"]["pairs"] == [2]
    assert (tmp_path / "out" / "figures" / "accuracy_by_pairs.png").is_file()


def test_the_same_model_under_another_name_is_no_different(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "twin").symlink_to(folders[0])
    found = compare_models(load_comparison([folders[0], str(tmp_path / "twin")], FEW), tmp_path / "out")
    assert list(found["arms"]) == ["base (1)", "base (2)"]
    rows = found["comparisons"]["base (2)"]["base (1)"]
    assert all(row["difference"] == 0 and not row["significant"] for row in rows.values())


def test_time_and_memory_where_they_are_asked_for(folders: list[str], tmp_path: Path) -> None:
    costs = "evaluate.efficiency={lengths: [8], new_tokens: 1, repeats: 1}"
    found = compare_models(load_comparison(folders, [*FEW, costs]), tmp_path / "out")
    assert list(found["efficiency"]["arms"]) == ["base", "hybrid", "transformer"]
    assert (tmp_path / "out" / "figures" / "efficiency.svg").is_file()


@pytest.mark.parametrize("fault", ["weights", "tokenizer"])
def test_what_is_wrong_with_a_later_model_is_found_before_the_first_is_scored(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model = pico_base(vocab_size=len(pico_tokenizer()) if fault == "weights" else 61, layers=2)
    if fault == "weights":
        model.backbone.layers[1].mixer.in_proj.weight.data[2, 3] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    pico_tokenizer().save_pretrained(tmp_path / "broken")
    monkeypatch.setattr(comparison, "evaluate_model", lambda *_: pytest.fail("a model was scored"))
    with pytest.raises(ModelError) as error:
        compare_models(load_comparison([*folders, str(tmp_path / "broken")], FEW), tmp_path / "out")
    assert str(tmp_path / "broken") in str(error.value)
    says = "backbone.layers.1.mixer.in_proj.weight holds NaN" if fault == "weights" else "largest token id is 972"
    assert says in str(error.value.value)
    assert not (tmp_path / "out").exists()
