"""A run with `splice.state_size`: the hybrid and its control are cut, exported, verified and reloaded as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.models.lookup import family_of
from surgery.models.sizes import state_bytes
from surgery.splice.state_size import cut_from_json
from tests.integration.conftest import BASE, RECIPE, SMALL, run_small, surgery
from tests.support.errors import assert_refused
from tests.support.pico import tokens

SIZE = 4


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small quickstart whose state is cut from 32 to 4 channels."""
    cwd = tmp_path_factory.mktemp("cut")
    done = run_small(cwd, f"splice.state_size={SIZE}")
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "quickstart"


def widths(folder: Path) -> set[int]:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    return {spec.state_size for spec in family_of(config).mixers(config)}


def test_hybrid_and_control_have_the_same_cut_before_training(cut: Path) -> None:
    assert widths(cut / "spliced") == widths(cut / "trained") == widths(cut / "no_splice") == {SIZE}
    kept = cut_from_json(json.loads((cut / "state.json").read_text())).kept["L0H"][0]
    base, hybrid = (
        AutoModelForCausalLM.from_pretrained(path).backbone.layers[0].mixer for path in (BASE, cut / "spliced")
    )
    inner = base.intermediate_size
    for block in range(2):  # B, then C
        ours, theirs = (m.in_proj.weight[2 * inner + block * n :][:n] for m, n in ((hybrid, SIZE), (base, 32)))
        assert torch.equal(ours, theirs[list(kept)])
    assert torch.equal(hybrid.in_proj.weight[: 2 * inner], base.in_proj.weight[: 2 * inner])


def test_results_and_documents_name_the_cut(cut: Path, finished: Path) -> None:
    results = json.loads((cut / "results.json").read_text())
    assert set(results["arms"]) == {"base", "no_splice", "hybrid", "hybrid_heads_off"}
    assert results["step_zero_gap"]["max_logit"] > 0
    for page in (cut / "report.html", cut / "export" / "README.md"):
        assert "cut from 32 to 4 channels before training" in page.read_text()
        assert "with its state cut the same way" in page.read_text()
    assert "channels before training" not in (finished / "report.html").read_text()
    assert not (finished / "state.json").exists()


def test_the_export_is_verified_and_reloaded(cut: Path) -> None:
    export = cut / "export"
    config = json.loads((export / "config.json").read_text())
    assert (config["state_size"], config["base_state_size"], config["splice"][0]["qk_width"]) == (SIZE, 32, 32)
    checked = surgery("verify", str(export), cwd=cut)
    assert checked.returncode == 0 and "agree on the splice" in checked.stdout, checked.stdout + checked.stderr
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (cut / "trained", export)]
    with torch.no_grad():
        one, other = (model(tokens()).logits for model in models)
    assert torch.equal(one, other)
    assert state_bytes(models[1].config) < state_bytes(AutoModelForCausalLM.from_pretrained(BASE).config)


def test_a_cut_hybrid_is_trained_further(cut: Path, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("base.model")]
    done = surgery(
        "run", str(RECIPE), *words, f"base.model={cut / 'export'}", "splice=null", "--to", "train", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert widths(tmp_path / "runs" / "quickstart" / "trained") == {SIZE}


def test_dry_runs_know_the_cut(tmp_path: Path) -> None:
    values = ("splice.state_size=null,2", "splice.num_heads=0,1,2")
    done = surgery("sweep", str(RECIPE), *SMALL, *values, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| quickstart")]
    controls = {row[0].removeprefix("quickstart-splice."): row[5] for row in rows}
    first = {size: f"state_size-{size}_splice.num_heads-2" for size in ("null", "2")}
    assert controls == {
        key: "run" if key == first[size] else f"copied from quickstart-splice.{first[size]}"
        for size in first
        for key in (first[size], first[size].replace("heads-2", "heads-1"))
    }
    states = []
    for size in ("null", "2"):
        alone = surgery("run", str(RECIPE), *SMALL, f"splice.state_size={size}", "--dry-run", cwd=tmp_path)
        states.append(
            next(line.split("│")[2].strip() for line in alone.stdout.splitlines() if line.startswith("│ hybrid"))
        )
    assert float(states[1].split()[0]) < 0.6 * float(states[0].split()[0])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("splice.state_size=32",), ("splice.state_size: 32.", "The model's state has 32 channels", "smaller number")),
        (("splice.state_size=0",), ("splice.state_size: 0.", "greater than 0")),
    ],
)
def test_sizes_are_refused_before_anything_runs(tmp_path: Path, words: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert_refused(run_small(tmp_path, *words), *found)
    assert not list(tmp_path.iterdir())


def test_no_heads_need_a_control_that_trains(tmp_path: Path) -> None:
    values = ("splice.state_size=4", "splice.num_heads=0,1", "train.trainable=new_heads")
    done = surgery("sweep", str(RECIPE), *SMALL, *values, "--dry-run", cwd=tmp_path)
    assert_refused(done, "splice.num_heads: 0.", "only new heads train")
