"""The main job end to end on the shipped base: what a run writes, skips, resumes, and ends with."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surgery.recipe import check_recipe, load_recipe
from surgery.types import head_set_from_json, plan_from_json
from tests.integration.conftest import RECIPE, SMALL, run_small, surgery
from tests.support.processes import library


def test_a_run_leaves_every_artifact(finished: Path) -> None:
    for name in ("heads.json", "plan.json", "results.json", "spliced", "trained", "no_splice", "export", "recipe.yaml"):
        assert (finished / name).exists(), name
    assert not list(finished.glob(".*.tmp")) and not (finished / "steps").exists()
    log = (finished / "run.log").read_text()
    for stage in ("locate", "plan", "splice", "train", "control", "evaluate", "export"):
        assert f" {stage}  done in " in log, stage
    figures = {p.name for p in (finished / "figures").rglob("*.png")}
    assert {"head_maps.png", "accuracy_by_pairs.png", "training.png"} <= figures


def test_results_have_the_documented_form(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert list(results["arms"]) == ["base", "no_splice", "hybrid_heads_off", "hybrid"]
    for arm in results["arms"].values():
        assert set(arm["kv_retrieval"]) == {"4", "8"}
        for entry in (arm["kv_retrieval"]["8"], arm["letter_choice"], arm["closed_book"], arm["closed_book_seen"]):
            assert 0 <= entry["low"] <= entry["accuracy"] <= entry["high"] <= 1 and entry["n"] > 0
        assert arm["perplexity"] > 1
        said = arm["kv_retrieval"]["8"]["generated"]
        assert 0 <= said["low"] <= said["accuracy"] <= said["begun"] <= 1
    row = results["comparisons"]["hybrid"]["no_splice"]["kv_retrieval/8/generated"]
    assert row["low"] <= row["difference"] <= row["high"] and 0 <= row["p_two_sided"] <= 1
    assert set(results["seconds"]) == {"locate", "plan", "splice", "train", "control", "evaluate"}
    assert results["versions"]["torch"] == torch.__version__
    assert check_recipe(results["recipe"]) == load_recipe(finished / "recipe.yaml")
    assert "recipe" not in json.loads((finished / "export" / "results.json").read_text()), "it has local paths"


def test_heads_plan_config_results_and_card_agree(finished: Path) -> None:
    heads = head_set_from_json(json.loads((finished / "heads.json").read_text()))
    plan = plan_from_json(json.loads((finished / "plan.json").read_text()))
    config = json.loads((finished / "export" / "config.json").read_text())
    card = (finished / "export" / "README.md").read_text()
    from_config = [f"L{site['layer']}H{head}" for site in config["splice"] for head in site["heads"]]
    assert sorted(str(s.head) for s in heads.chosen) == sorted(map(str, plan.heads)) == sorted(from_config)
    assert json.loads((finished / "results.json").read_text())["heads"] == from_config
    for head in from_config:
        assert f"| {head} |" in card
    for site, graft in zip(config["splice"], plan.grafts, strict=True):
        assert (site["mode"], site["init"], site["reads"]) == (graft.mode, graft.init, list(graft.reads))


def test_add_mode_starts_as_the_base(finished: Path) -> None:
    gap = json.loads((finished / "splice.json").read_text())
    assert gap == {"max_logit": 0.0, "kl": 0.0, "same_top": 1.0}


def test_a_finished_run_is_skipped_stage_by_stage(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    again = run_small(tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("skipped: already finished with the same inputs") == 7


def test_a_changed_section_reruns_its_stage_and_those_below(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    again = run_small(tmp_path, "evaluate.examples=8", "evaluate.read_twice=true")
    assert again.returncode == 0, again.stderr
    skipped = [line.split()[0] for line in again.stdout.splitlines() if "skipped" in line]
    assert skipped == ["locate", "plan", "splice", "train", "control"]
    run = tmp_path / "runs" / "quickstart"
    results = json.loads((run / "results.json").read_text())
    assert results["arms"]["base"]["letter_choice"]["n"] == 8
    twice = ["base_read_twice", "no_splice_read_twice"]
    assert list(results["arms"]) == ["base", "no_splice", *twice, "hybrid_heads_off", "hybrid"]
    assert "no_splice_read_twice" in results["comparisons"]["hybrid"]
    assert "control, prompt read twice" in (run / "report.html").read_text()


def test_results_are_shown_as_they_were_after_a_partial_run(finished: Path, tmp_path: Path) -> None:
    """With more pairs in training, the verdict of the new recipe would be on 8 pairs."""
    shutil.copytree(finished.parent, tmp_path / "runs")
    before = surgery("show", "quickstart", cwd=tmp_path)
    again = run_small(tmp_path, "train.sources.0.pairs=[4, 8]", options=("--to", "plan"))
    assert before.returncode == again.returncode == 0, again.stderr
    assert "[4, 8]" in again.stdout, "the recipe of the folder has changed"
    assert "KV-retrieval, 4 pairs" in before.stdout
    assert surgery("show", "quickstart", cwd=tmp_path).stdout == before.stdout


def test_a_stage_runs_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    again = surgery("plan", str(RECIPE), *SMALL, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "plan  done" in again.stdout and "locate" not in again.stdout


def test_a_stage_without_its_input_says_which_one_writes_it(tmp_path: Path) -> None:
    done = surgery("train", str(RECIPE), *SMALL, cwd=tmp_path)
    assert done.returncode == 2 and "needs locate" in done.stderr and "Run it first" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_stage_alone_refuses_what_was_made_with_other_settings(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    done = surgery("export", str(RECIPE), *SMALL, "train.steps=1000", cwd=tmp_path)
    assert done.returncode == 2 and "train" in done.stderr
    assert "1000" not in (tmp_path / "runs" / "quickstart" / "recipe.yaml").read_text()


def test_without_the_control_nothing_of_it_is_left(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    done = run_small(tmp_path, "train.control=false")
    assert done.returncode == 0, done.stderr
    skipped = [line.split()[0] for line in done.stdout.splitlines() if "skipped" in line]
    assert skipped == ["locate", "plan", "splice", "train"]
    run = tmp_path / "runs" / "quickstart"
    assert not list(run.rglob("*no_splice*"))
    assert set(json.loads((run / "results.json").read_text())["arms"]) == {"base", "hybrid_heads_off", "hybrid"}


def test_the_run_folder_of_another_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    other = run_small(tmp_path, "seed=7", options=("--to", "plan"))
    assert other.returncode == 2 and "--overwrite" in other.stderr
    assert (tmp_path / "runs" / "quickstart" / "results.json").exists()
    replaced = run_small(tmp_path, "seed=7", options=("--to", "plan", "--overwrite"))
    assert replaced.returncode == 0, replaced.stderr
    assert not (tmp_path / "runs" / "quickstart" / "results.json").exists()


def kill_when(cwd: Path, pattern: str, seconds_later: float, *options: str) -> None:
    """Starts the small run and kills it, without a chance to clean up, once `pattern` is in its folder."""
    process = library().start(("surgery", "run", str(RECIPE), *SMALL, *options), cwd)
    folder, deadline = cwd / "runs" / "quickstart", time.time() + 120
    while not list(folder.glob(pattern)) and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(seconds_later)
    process.kill(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL


def test_killed_inside_training_it_ends_with_the_same_weights(finished: Path, tmp_path: Path) -> None:
    """After the first checkpoint; test_killed_training.py tries more moments."""
    kill_when(tmp_path, "steps/*/step_000002", 0, "--to", "train")
    assert not (tmp_path / "runs" / "quickstart" / "trained").exists()
    resumed = run_small(tmp_path, options=("--to", "train"))
    assert resumed.returncode == 0, resumed.stderr
    ours = load_file(tmp_path / "runs" / "quickstart" / "trained" / "model.safetensors")
    whole = load_file(finished / "trained" / "model.safetensors")
    assert set(ours) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, ours[name]), name


def begun(finished: Path, cwd: Path, first: str) -> Path:
    """A copy of the finished run in which the stage `first` and those below have not run yet."""
    run = cwd / "runs" / "quickstart"
    shutil.copytree(finished, run)
    stages = ("locate", "plan", "splice", "train", "control", "evaluate", "export")
    for stage in stages[stages.index(first) :]:
        (run / ".stages" / f"{stage}.json").unlink()
    for left in ("export", "figures/evaluate", "no_splice") if first == "control" else ("export", "figures/evaluate"):
        shutil.rmtree(run / left)
    (run / "results.json").unlink()
    return run


def test_killed_between_the_early_stages_it_goes_on(finished: Path, tmp_path: Path) -> None:
    kill_when(tmp_path, ".stages/locate.json", 0.05)
    resumed = run_small(tmp_path, options=("--to", "splice"))
    assert resumed.returncode == 0, resumed.stderr
    assert "locate  skipped" in resumed.stdout
    run = tmp_path / "runs" / "quickstart"
    for name in ("heads.json", "plan.json", "splice.json"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize(
    ("first", "pattern", "later"),
    [("control", ".stages/control.json", 0.4), ("evaluate", ".export.*/*/model.safetensors", 0.1)],
)
def test_killed_elsewhere_it_goes_on(finished: Path, tmp_path: Path, first: str, pattern: str, later: float) -> None:
    """While arms are scored, and inside the export."""
    run = begun(finished, tmp_path, first)
    kill_when(tmp_path, pattern, later)
    resumed = run_small(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "train  skipped" in resumed.stdout
    arms, whole = (json.loads((r / "results.json").read_text())["arms"] for r in (run, finished))
    assert arms == whole
    assert (run / "export" / "export.json").is_file() and not list(run.rglob(".*.tmp"))


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    ends = ("train.plateau={window: 1, patience: 1, min_steps: 1}", "train.optimizer={schedule: wsd, warmup: 1}")
    done = run_small(tmp_path, *ends, options=("--dry-run",))
    assert "6 at most, fewer if a plateau is found" in done.stdout and done.stdout.count("at most") == 2
    assert done.returncode == 0 and "new parameters" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "overrides",
    [("splice.mode=replace",), ("splice.init=random", "splice.num_heads=2", "splice.select=random")],
    ids=["replace", "random init, two random heads"],
)
def test_other_ways_to_splice_export_too(finished: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    few = ("train.steps=2", "train.control=false", "evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[4]")
    done = run_small(tmp_path, *overrides, *few)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "runs" / "quickstart" / "export" / "export.json").read_text())
    assert report["max_logit_difference"] == 0 and report["checked_without_surgery"]
    if "splice.mode=replace" in overrides:
        gap = json.loads((tmp_path / "runs" / "quickstart" / "splice.json").read_text())
        assert gap["max_logit"] > 0
        config = json.loads((tmp_path / "runs" / "quickstart" / "export" / "config.json").read_text())
        weights = load_file(tmp_path / "runs" / "quickstart" / "export" / "model.safetensors")
        for site in config["splice"]:
            block = weights[f"backbone.layers.{site['layer']}.mixer.out_proj.weight"]
            for head in site["heads"]:
                assert not block[:, head * config["head_dim"] : (head + 1) * config["head_dim"]].any()
