"""`surgery sweep`: ordinary runs that share their stages, and one table of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import QUICK, RECIPE, SMALL, assert_all_refused, ran, surgery

VALUES = "splice.num_heads=0,1,2"
ONE, TWO = "quickstart-splice.num_heads-1", "quickstart-splice.num_heads-2"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep of which one run was stopped before its end, and what the second command printed."""
    cwd = tmp_path_factory.mktemp("sweep")
    folder = cwd / "runs" / "quickstart-sweep"
    ran("sweep", str(RECIPE), *QUICK, VALUES, cwd=cwd)
    for gone in ("sweep.json", f"{ONE}/.stages/control.json", f"{ONE}/.stages/evaluate.json"):
        (folder / gone).unlink()
    resumed = ran("sweep", str(RECIPE), *QUICK, VALUES, cwd=cwd)
    return folder, resumed.stdout


def test_finished_stages_are_skipped_and_equal_ones_taken(swept: tuple[Path, str]) -> None:
    folder, printed = swept
    first, second = printed.split("run 2 of 2")
    assert first.count("skipped: already finished with the same inputs") == 7
    lines = {line.split()[0]: line for line in second.splitlines() if "skipped" in line}
    assert f"copied from {TWO}" in lines["control"] and "already finished" in lines["locate"]
    origins = {
        name: json.loads((folder / ONE / ".stages" / f"{name}.json").read_text())["origin"]
        for name in ("locate", "control")
    }
    assert origins == {"locate": f"scores from {TWO}", "control": f"copied from {TWO}"}
    shared = [(folder / run / "no_splice" / "model.safetensors").stat().st_ino for run in (ONE, TWO)]
    assert shared[0] == shared[1], "one file on the disk"


def test_each_run_equals_the_run_alone(swept: tuple[Path, str], tmp_path: Path) -> None:
    """In which nothing is shared."""
    ran("run", str(RECIPE), *QUICK, "--to", "control", cwd=tmp_path)
    run, alone = swept[0] / ONE, tmp_path / "runs" / "quickstart"
    for name in ("heads.json", "heads.csv", "locate.html", "plan.json", "trained/model.safetensors",
                 "no_splice/model.safetensors"):  # fmt: skip
        assert (run / name).read_bytes() == (alone / name).read_bytes(), name
    figures = sorted(p.relative_to(alone) for p in (alone / "figures" / "locate").iterdir())
    assert figures and all((run / name).read_bytes() == (alone / name).read_bytes() for name in figures)
    assert (run / "export" / "export.json").is_file() and (run / "report.html").is_file()


def test_the_summary_has_the_numbers_of_the_runs(swept: tuple[Path, str]) -> None:
    folder, printed = swept
    summary = json.loads((folder / "sweep.json").read_text())
    arms = {run: json.loads((folder / run / "results.json").read_text())["arms"] for run in (ONE, TWO)}
    zero, one, two = summary["points"]
    assert [(p["values"]["splice.num_heads"], p["run"], p["arm"]) for p in summary["points"]] == [
        (0, ONE, "no_splice"), (1, ONE, "hybrid"), (2, TWO, "hybrid"),
    ]  # fmt: skip
    for point, arm in ((zero, arms[ONE]["no_splice"]), (one, arms[ONE]["hybrid"]), (two, arms[TWO]["hybrid"])):
        entry, found = arm["kv_retrieval"]["4"], point["accuracy"]["retrieval"]
        assert (found["value"], found["n"]) == (pytest.approx(entry["accuracy"]), entry["n"])
        assert found["low"] <= found["value"] <= found["high"] and point["perplexity"] == arm["perplexity"]
    assert (zero["kv_bytes_per_token"], zero["new_parameters"], zero["heads"]) == (0, 0, [])
    assert two["kv_bytes_per_token"] == 2 * one["kv_bytes_per_token"] > 0
    assert zero["state_bytes"] < one["state_bytes"], "a branch has convolution states"
    assert two["new_parameters"] == 2 * one["new_parameters"] > 0 and one["heads"][0] in two["heads"]
    table = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| splice.num_heads", "| ---", "| 0 (control)", "| 1", "| 2"]
    assert f"{one['accuracy']['retrieval']['value']:.3f}" in table[3]
    assert {p.name for p in (folder / "figures").iterdir()} == {"sweep.png", "sweep.svg", "sweep.csv"}
    assert "0 (control)" in (folder / "sweep.html").read_text()


def test_a_finished_sweep_plans_and_computes_nothing(swept: tuple[Path, str]) -> None:
    folder = swept[0]
    before = (folder / "sweep.json").read_bytes()
    planned = surgery("sweep", str(RECIPE), *QUICK, VALUES, "--dry-run", cwd=folder.parents[1])
    assert planned.returncode == 0 and planned.stdout.count("finished") == 14, planned.stdout
    more = surgery("sweep", str(RECIPE), *QUICK, "splice.num_heads=2,3", "--dry-run", cwd=folder.parents[1])
    three = next(line for line in more.stdout.splitlines() if line.startswith("| quickstart-splice.num_heads-3"))
    assert three.count("run |") == 5 and any(f"scores from {run} |" in three for run in (ONE, TWO))
    assert any(f"copied from {run} |" in three for run in (ONE, TWO))
    assert (folder / "sweep.json").read_bytes() == before


def test_a_dry_run_lists_what_runs_and_what_is_shared(tmp_path: Path) -> None:
    done = surgery("sweep", str(RECIPE), *SMALL, VALUES, "seed=0,1", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| quickstart-")]
    rows = {line[0]: line[1:] for line in lines}
    for seed in (0, 1):
        assert rows[f"{TWO}_seed-{seed}"] == ["run"] * 7
        shared = [f"scores from {TWO}_seed-{seed}", "run", "run", "run", f"copied from {TWO}_seed-{seed}", "run", "run"]
        assert rows[f"{ONE}_seed-{seed}"] == shared
    assert f"splice.num_heads=0, seed=1: the control of {ONE}_seed-1" in done.stdout


def test_values_are_refused_before_anything_runs(tmp_path: Path) -> None:
    values = {
        ("splice.num_heads=1,9999",): ("splice.num_heads: 9999.", "The model has only"),
        ("splice.select=sharpen", "splice.num_heads=1,13"): ("splice.num_heads: 13.", "locate.top_k"),
        ("splice.state_size=4", "splice.num_heads=0,1", "train.trainable=new_heads"): (
            "splice.num_heads: 0.",
            "only new heads train",
        ),
    }
    for options in ((), ("--dry-run",)):
        cases = {("sweep", str(RECIPE), *SMALL, *words, *options): said for words, said in values.items()}
        assert_all_refused(cases, tmp_path)
