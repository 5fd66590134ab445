"""A run in which everything is set otherwise than in the quickstart: what it cuts, trains, measures and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from surgery.models.lookup import family_of
from surgery.models.sizes import sizes_of
from surgery.recipe import check_recipe
from surgery.recipe.yaml import read_mapping
from surgery.run.context import Run
from surgery.run.evaluate_stage import _teacher_arm
from surgery.splice.state_size import cut_from_json
from tests.integration.conftest import BASE, QUICK, RECIPE, SMALL, ran, run_small
from tests.support.pico import pico_family, tokens

SIZE = 4
DISTILS = "train.sources.0.weights.distil=1.0"
WAYS = (
    *QUICK,
    "splice={mode: replace, init: random, select: random, num_heads: 2, state_size: 4}",
    "train.steps=30",
    "train.plateau={window: 1, patience: 1, threshold: 0.0, min_steps: 4}",
    "train.optimizer={schedule: wsd, decay: 0.3, warmup: 1}",
    f"train.teacher.model={BASE}",
    DISTILS,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random heads are replaced by random attention, the state is cut from 32 to 4 channels, the base teaches."""
    cwd = tmp_path_factory.mktemp("ways")
    run_small(cwd, *WAYS)
    return cwd / "runs" / "quickstart"


def widths(folder: Path) -> set[int]:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    return {spec.state_size for spec in family_of(config).mixers(config)}


def test_hybrid_and_control_have_the_same_cut_before_training(run: Path) -> None:
    assert widths(run / "spliced") == widths(run / "trained") == widths(run / "no_splice") == {SIZE}
    kept = cut_from_json(json.loads((run / "state.json").read_text())).kept["L0H"][0]
    base, hybrid = (
        AutoModelForCausalLM.from_pretrained(path).backbone.layers[0].mixer for path in (BASE, run / "spliced")
    )
    inner = base.intermediate_size
    for block in range(2):  # B, then C
        ours, theirs = (m.in_proj.weight[2 * inner + block * n :][:n] for m, n in ((hybrid, SIZE), (base, 32)))
        assert torch.equal(ours, theirs[list(kept)])
    assert torch.equal(hybrid.in_proj.weight[: 2 * inner], base.in_proj.weight[: 2 * inner])
    results = json.loads((run / "results.json").read_text())
    assert results["step_zero_gap"]["max_logit"] > 0
    for page in (run / "report.html", run / "export" / "README.md"):
        assert "cut from 32 to 4 channels before training" in page.read_text(), page
        assert "with its state cut the same way" in page.read_text(), page


def test_the_export_is_what_was_trained(run: Path) -> None:
    config = json.loads((run / "export" / "config.json").read_text())
    assert (config["state_size"], config["base_state_size"]) == (SIZE, 32)
    record = json.loads((run / "export" / "export.json").read_text())
    assert record["max_logit_difference"] == 0 and record["checked_without_surgery"]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (run / "trained", run / "export")]
    with torch.no_grad():
        one, other = (model(tokens()).logits for model in models)
    assert torch.equal(one, other)
    assert sizes_of(models[1]).state_bytes < sizes_of(AutoModelForCausalLM.from_pretrained(BASE)).state_bytes


def test_training_ends_at_the_plateau_and_the_control_trains_as_many_steps(run: Path) -> None:
    names = ("training", "no_splice_training", "plateau", "results")
    hybrid, control, steps, results = (json.loads((run / f"{name}.json").read_text()) for name in names)
    (entry,) = (entry for entry in hybrid if "last_step" in entry)
    assert [len(hybrid), len(control)] == [entry["last_step"]] * 2 and 4 <= entry["step"] < len(hybrid) < 30
    assert not any("last_step" in entry for entry in control), "the control looks for no plateau"
    assert steps == results["training"] == {"finetune": {"steps": len(hybrid), "plateau": entry["step"]}}
    text = f"{len(hybrid)} steps (of at most 30; plateau at step {entry['step']})"
    assert text in (run / "report.html").read_text()


def test_results_say_what_of_the_gap_to_the_teacher_is_closed(run: Path, finished: Path, tmp_path: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert list(results["arms"]) == ["base", "no_splice", "hybrid_heads_off", "hybrid", "teacher"]
    assert results["arms"]["teacher"] == results["arms"]["base"]  # it is the same model
    gap = results["gap_closed"]
    assert gap.keys() == results["comparisons"]["hybrid"]["base"].keys()
    assert gap.keys() == results["comparisons"]["hybrid"]["teacher"].keys()
    assert all((entry["value"] is None) == ("reason" in entry) for entry in gap.values())
    assert not {"gap_closed", "skipped"} & json.loads((finished / "results.json").read_text()).keys()

    other = tmp_path / "other"  # with other tokens, it is no arm
    pico_family("llama", vocab_size=1024).save_pretrained(other)
    shutil.copy(BASE / "tokenizer_config.json", other)
    data = json.loads((BASE / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 1023, "content": "<|another|>"})
    (other / "tokenizer.json").write_text(json.dumps(data))
    recipe = check_recipe(read_mapping(RECIPE, [*SMALL, DISTILS, f"train.teacher.model={other}"]))
    found, skipped = _teacher_arm(Run(recipe, tmp_path / "run", Accelerator(cpu=True)))
    assert found == {} and "tokenizer" in skipped["teacher"]


def test_a_cut_hybrid_is_trained_further(run: Path, tmp_path: Path) -> None:
    further = (f"base.model={run / 'export'}", "splice=null", "--to", "train")
    ran("run", str(RECIPE), *QUICK, *further, cwd=tmp_path)
    assert widths(tmp_path / "runs" / "quickstart" / "trained") == {SIZE}
