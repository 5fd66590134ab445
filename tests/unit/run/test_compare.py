"""What `surgery compare` is given, and what it says of models side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from surgery.errors import ModelError, RecipeError
from surgery.run import compare as comparison
from surgery.run.compare import compare_models, load_comparison
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


def test_what_cannot_be_meant_is_refused() -> None:
    refused: list[tuple[list[str], tuple[str, ...], str]] = [
        ([], (), "models"),
        (["a", "b", "b/"], (), "models: .*b is listed twice"),
        (["a"], ("models=[b]",), "Give the models as arguments"),
        (["a"], ("evaluate.pears=[2]",), "evaluate.pears"),
        (["a"], ("plugins=[no_such_module]",), "plugins: no_such_module"),
        (["a"], ("evaluate.read_twice=true",), "^evaluate: `read_twice` adds arms"),
    ]
    for models, change, field in refused:
        with pytest.raises(RecipeError, match=field):
            load_comparison(models, change)


def test_models_are_held_against_the_first(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "twin").symlink_to(folders[0])
    costs = "evaluate.efficiency={lengths: [8], new_tokens: 1, repeats: 1}"
    folder, reporter = tmp_path / "out", Mock()
    found = compare_models(load_comparison([*folders, str(tmp_path / "twin")], [*FEW, costs]), folder, reporter)
    assert reporter.mock_calls[0] == call.start("compare", "evaluating every model")
    assert reporter.progress.call_args.args == (6, 6, "base (2)")
    assert list(found["arms"]) == ["base (1)", "hybrid", "base (2)"] and not found["skipped"]
    tested = [(arm, list(of)) for arm, of in found["comparisons"].items()]
    assert tested == [("hybrid", ["base (1)"]), ("base (2)", ["base (1)"])]
    row = found["comparisons"]["hybrid"]["base (1)"]["kv_retrieval/2"]
    accuracies = [found["arms"][name]["kv_retrieval"]["2"]["accuracy"] for name in ("hybrid", "base (1)")]
    assert row["difference"] == pytest.approx(accuracies[0] - accuracies[1])
    twin = found["comparisons"]["base (2)"]["base (1)"].values()
    assert all(row["difference"] == 0 and not row["significant"] for row in twin)
    assert list(found["efficiency"]["arms"]) == ["base (1)", "hybrid", "base (2)", "transformer"]
    recipe = json.loads((folder / "results.json").read_text())["recipe"]
    assert recipe["models"] == ["base", "hybrid", "base"] and recipe["evaluate"]["pairs"] == [2]
    assert {"accuracy_by_pairs.png", "efficiency.svg"} <= {path.name for path in (folder / "figures").iterdir()}


def test_faults_of_a_later_model_are_found_before_the_first_is_evaluated(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "evaluate_model", lambda *_: pytest.fail("a model was evaluated"))
    reporter = Mock()
    for vocabulary, says in (
        (len(pico_tokenizer()), "backbone.layers.1.mixer.in_proj.weight holds NaN"),
        (61, "largest token id is 972"),
    ):
        broken, model = tmp_path / str(vocabulary), pico_base(vocab_size=vocabulary, layers=2)
        if "NaN" in says:
            model.backbone.layers[1].mixer.in_proj.weight.data[2, 3] = torch.nan
        model.save_pretrained(broken)
        pico_tokenizer().save_pretrained(broken)
        with pytest.raises(ModelError) as error:
            compare_models(load_comparison([*folders, str(broken)], FEW), tmp_path / "out", reporter)
        assert str(broken) in str(error.value) and says in str(error.value.value)
        assert not (tmp_path / "out").exists() and not reporter.mock_calls
