"""`surgery sweep`: ordinary runs that share their stages, and one table of them."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from surgery.files.ownership import mark
from tests.integration.conftest import RECIPE, SMALL, surgery
from tests.support.errors import assert_refused
from tests.support.processes import library

VALUES = "splice.num_heads=0,1,2"
ONE, TWO = "quickstart-splice.num_heads-1", "quickstart-splice.num_heads-2"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep that was killed in its second run and resumed, and what the second command printed."""
    cwd = tmp_path_factory.mktemp("sweep")
    folder = cwd / "runs" / "quickstart-sweep"
    process = library().start(("surgery", "sweep", str(RECIPE), *SMALL, VALUES), cwd)
    deadline = time.time() + 240
    while not (folder / ONE / ".stages" / "splice.json").exists() and time.time() < deadline:
        time.sleep(0.01)
    process.kill(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert (folder / TWO / "results.json").exists() and not (folder / ONE / "results.json").exists()
    assert not (folder / "sweep.json").exists()
    resumed = surgery("sweep", str(RECIPE), *SMALL, VALUES, cwd=cwd)
    assert resumed.returncode == 0, resumed.stderr
    return folder, resumed.stdout


def test_finished_stages_are_skipped_and_equal_ones_taken(swept: tuple[Path, str]) -> None:
    folder, printed = swept
    first, second = printed.split("run 2 of 2")
    assert first.count("skipped: already finished with the same inputs") == 7
    lines = {line.split()[0]: line for line in second.splitlines() if "skipped" in line}
    assert f"copied from {TWO}" in lines["control"] and "already finished" in lines["locate"]
    manifests = {
        name: json.loads((folder / ONE / ".stages" / f"{name}.json").read_text()) for name in ("locate", "control")
    }
    assert manifests["locate"]["origin"] == f"scores from {TWO}"
    assert manifests["control"]["origin"] == f"copied from {TWO}"
    shared = [(folder / run / "no_splice" / "model.safetensors").stat().st_ino for run in (ONE, TWO)]
    assert shared[0] == shared[1], "one file on the disk"


def test_each_run_equals_the_run_alone(swept: tuple[Path, str], finished: Path) -> None:
    """`finished` is the same recipe with one head, in which nothing was shared."""
    run = swept[0] / ONE
    for name in ("heads.json", "heads.csv", "locate.html", "plan.json", "trained/model.safetensors"):
        assert (run / name).read_bytes() == (finished / name).read_bytes(), name
    assert (run / "no_splice/model.safetensors").read_bytes() == (finished / "no_splice/model.safetensors").read_bytes()
    figures = sorted(p.relative_to(finished) for p in (finished / "figures" / "locate").iterdir())
    assert figures and all((run / name).read_bytes() == (finished / name).read_bytes() for name in figures)
    ours, alone = (json.loads((r / "results.json").read_text()) for r in (run, finished))
    assert ours["arms"] == alone["arms"] and ours["heads"] == alone["heads"]
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
        retrieval = [arm["kv_retrieval"]["4"], arm["kv_retrieval"]["8"], arm["letter_choice"]]
        right, n = sum(round(e["accuracy"] * e["n"]) for e in retrieval), sum(e["n"] for e in retrieval)
        found = point["accuracy"]["retrieval"]
        assert (found["value"], found["n"]) == (pytest.approx(right / n), n)
        assert found["low"] < found["value"] < found["high"]
        assert point["tasks"]["closed_book"].items() >= arm["closed_book"].items()
        assert point["perplexity"] == arm["perplexity"]
    assert (zero["kv_bytes_per_token"], zero["new_parameters"], zero["heads"]) == (0, 0, [])
    assert two["kv_bytes_per_token"] == 2 * one["kv_bytes_per_token"] > 0
    assert zero["state_bytes"] < one["state_bytes"], "a branch has convolution states"
    assert two["new_parameters"] == 2 * one["new_parameters"] > 0
    assert one["heads"] == two["heads"][:1] or one["heads"][0] in two["heads"]
    table = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| splice.num_heads", "| ---", "| 0 (control)", "| 1", "| 2"]
    assert f"{one['accuracy']['retrieval']['value']:.3f}" in table[3]
    assert {p.name for p in (folder / "figures").iterdir()} == {"sweep.png", "sweep.svg", "sweep.csv"}
    assert "0 (control)" in (folder / "sweep.html").read_text()


def test_a_finished_sweep_plans_and_computes_nothing(swept: tuple[Path, str]) -> None:
    folder = swept[0]
    before = (folder / "sweep.json").read_bytes()
    planned = surgery("sweep", str(RECIPE), *SMALL, VALUES, "--dry-run", cwd=folder.parents[1])
    assert planned.returncode == 0 and planned.stdout.count("finished") == 14, planned.stdout
    more = surgery("sweep", str(RECIPE), *SMALL, "splice.num_heads=2,3", "--dry-run", cwd=folder.parents[1])
    three = next(line for line in more.stdout.splitlines() if line.startswith("| quickstart-splice.num_heads-3"))
    assert three.count("run |") == 5 and any(f"scores from {run} |" in three for run in (ONE, TWO))
    assert any(f"copied from {run} |" in three for run in (ONE, TWO))
    assert (folder / "sweep.json").read_bytes() == before


def test_dry_run_lists_what_runs_and_what_is_shared(tmp_path: Path) -> None:
    done = surgery("sweep", str(RECIPE), *SMALL, VALUES, "seed=0,1", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ")[1:] for line in done.stdout.splitlines()
    }
    for seed in (0, 1):
        assert rows[f"{TWO}_seed-{seed}"] == ["run"] * 7
        shared = [f"scores from {TWO}_seed-{seed}", "run", "run", "run", f"copied from {TWO}_seed-{seed}", "run", "run"]
        assert rows[f"{ONE}_seed-{seed}"] == shared
    assert f"splice.num_heads=0, seed=1: the control of {ONE}_seed-1" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("splice.num_heads=1,-2",), ("splice.num_heads: -2.",)),
        (("splice.num_heads=1,9999",), ("splice.num_heads: 9999.", "The model has only")),
        (("splice.select=sharpen", "splice.num_heads=1,13"), ("splice.num_heads: 13.", "locate.top_k")),
        (("splice.select=sharpen,list",), ("splice.select=list", "needs `heads`")),
        (("train.steps=2,x",), ("train.steps: 'x'.",)),
        (("train.steps=2",), ("No key has several values", "splice.num_heads=0,1,2")),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_values_are_refused_before_anything_runs(
    tmp_path: Path, values: tuple[str, ...], words: tuple[str, ...], options: tuple[str, ...]
) -> None:
    given = [word for word in SMALL if not word.startswith("train.steps")]
    done = surgery("sweep", str(RECIPE), *given, *values, *options, cwd=tmp_path)
    assert_refused(done, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["foreign", "run"])
def test_a_folder_that_is_no_sweep_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "runs" / "quickstart-sweep"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("dear")
    if kind == "run":
        mark(folder, "run")
    done = surgery("sweep", str(RECIPE), *SMALL, VALUES, "--overwrite", cwd=tmp_path)
    assert_refused(done, "sweep folder: runs/quickstart-sweep. The folder is not empty, and is not a sweep")
    assert (folder / "notes.txt").read_text() == "dear"
