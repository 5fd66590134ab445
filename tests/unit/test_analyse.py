"""The paper's procedures: what is gone is gone, at the right tokens, and only while it lasts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from surgery.analyse import analyse, check_change
from surgery.capture import altered
from surgery.errors import RecipeError
from surgery.families import family_of, mixer_of, structure_of
from surgery.recipe import AnalysisRecipe, Base, Change, Evaluate, check_recipe
from tests.pico import FAMILY_NAMES, pico_family, pico_tokenizer, tokens


def logits(model, **change):
    with torch.no_grad(), altered(model, family_of(model.config).mixers(model.config), **change):
        return model(tokens(2, 13), use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_disabled_head_is_a_head_with_zero_columns(name: str) -> None:
    model = pico_family(name)
    spec = family_of(model.config).mixers(model.config)[0]
    found = logits(model, off={spec.name: [1]})
    clean = model(tokens(2, 13), use_cache=False).logits
    structure = structure_of(spec)
    structure.out_proj(mixer_of(model, spec)).weight[:, structure.weight_slices(spec, 1).out] = 0
    assert torch.equal(found, model(tokens(2, 13), use_cache=False).logits)
    assert not torch.equal(found, clean)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_fewer_layers_are_a_smaller_model(name: str) -> None:
    model, seen = pico_family(name), {}
    before = model(tokens(2, 13), use_cache=False).logits
    blocks = model.base_model.layers
    handle = blocks[-1].register_forward_pre_hook(lambda _, args: seen.update(below=args[0]))
    model(tokens(2, 13), use_cache=False)
    handle.remove()
    norm = next(m for n, m in model.base_model.named_children() if "norm" in n)
    final = []
    handle = norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
    logits(model, off={}, layers=len(blocks) - 1)
    handle.remove()
    assert torch.equal(final[0], seen["below"])
    assert model.base_model.layers is blocks
    assert torch.equal(model(tokens(2, 13), use_cache=False).logits, before)


@pytest.mark.parametrize("name", ["zamba2", "bamba", "falcon_h1", "llama", "gpt_neox"])
def test_a_masked_row_is_the_last_one_alone(name: str) -> None:
    model = pico_family(name)
    with torch.no_grad():
        clean = model(tokens(2, 13), use_cache=False).logits
    found = logits(model, off={}, mask_last_row=True)
    torch.testing.assert_close(found[:, :-1], clean[:, :-1])
    assert (found[:, -1] - clean[:, -1]).abs().max() > 1e-3


def test_an_analysis_is_written_whole(tmp_path: Path) -> None:
    pico_family("zamba2", vocab_size=len(pico_tokenizer()) + 8).save_pretrained(tmp_path / "model")
    pico_tokenizer().save_pretrained(tmp_path / "model")
    changes = (Change(name="off", disable=("L1A2",)), Change(name="masked", mask_last_row=True, layers=3))
    section = Evaluate(pairs=(4,), examples=4, sentences=2)
    recipe = AnalysisRecipe(name="x", base=Base(model=str(tmp_path / "model")), changes=changes, evaluate=section)
    found = analyse(recipe, tmp_path / "out")
    assert list(found["arms"]) == ["base", "off", "masked"]
    assert json.loads((tmp_path / "out" / "analysis.json").read_text()) == json.loads(json.dumps(found))
    assert (tmp_path / "out" / "figures" / "accuracy_by_pairs.png").is_file()
    with pytest.raises(RecipeError, match="already"):
        analyse(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("zamba2", {"disable": ("L9H0",)}, "L0H0 to"),
        ("zamba2", {"disable": ("L0A0",)}, "L0H0 to"),
        ("zamba2", {"layers": 4}, "keep fewer"),
        ("mamba2", {"mask_last_row": True}, "no attention"),
    ],
)
def test_what_the_model_has_not_is_refused(name: str, change: dict, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        check_change(Change(name="x", **change), pico_family(name).config)


@pytest.mark.parametrize("changes", [[], [{"name": "x"}], [{"name": "base", "layers": 1}], [{"name": "x", "off": []}]])
def test_analyses_that_mean_nothing_are_refused(changes: list) -> None:
    with pytest.raises(RecipeError, match=r"changes|name"):
        check_recipe({"name": "x", "base": {"model": "m"}, "changes": changes}, AnalysisRecipe)
