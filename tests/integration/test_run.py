"""The main job end to end on the shipped base: what a run writes, skips, resumes, and ends with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from surgery.export.files import fingerprints
from surgery.recipe import check_recipe, load_recipe
from tests.integration.conftest import BASE, RECIPE, SMALL, refused, run_small, surgery
from tests.support import processes

STAGES = ["locate", "plan", "splice", "train", "control", "evaluate", "export"]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_leaves_every_artifact(finished: Path) -> None:
    for name in ("heads.json", "plan.json", "results.json", "spliced", "trained", "no_splice", "export", "recipe.yaml"):
        assert (finished / name).exists(), name
    assert not list(finished.glob(".*.tmp")) and not (finished / "steps").exists()
    log = (finished / "run.log").read_text()
    assert [stage for stage in STAGES if f" {stage}  done in " not in log] == []
    figures = {p.name for p in (finished / "figures").rglob("*.png")}
    assert {"head_maps.png", "accuracy_by_pairs.png", "training.png"} <= figures
    assert read(finished / "splice.json") == {"max_logit": 0.0, "kl": 0.0, "same_top": 1.0}, "it starts as the base"
    page = (finished / "locate.html").read_text(encoding="utf-8")
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    assert len({tuple(prompt["tokens"]) for prompt in data["prompts"]}) == 3
    assert all(len(prompt["rows"]) == len(data["heads"]) for prompt in data["prompts"])
    assert data["columns"][data["first"]]["key"] == "patching", "the recipe selects by it"


def test_results_have_the_documented_form(finished: Path) -> None:
    results = read(finished / "results.json")
    assert list(results["arms"]) == ["base", "no_splice", "hybrid_heads_off", "hybrid"]
    for arm in results["arms"].values():
        assert set(arm["kv_retrieval"]) == {"4", "8"} and arm["perplexity"] > 1
        for entry in (arm["kv_retrieval"]["8"], arm["letter_choice"], arm["closed_book"], arm["closed_book_seen"]):
            assert 0 <= entry["low"] <= entry["accuracy"] <= entry["high"] <= 1 and entry["n"] > 0
        said = arm["kv_retrieval"]["8"]["generated"]
        assert 0 <= said["low"] <= said["accuracy"] <= said["begun"] <= 1
    assert list(results["comparisons"]["hybrid"]) == ["base", "no_splice", "hybrid_heads_off"]
    row = results["comparisons"]["hybrid"]["no_splice"]["kv_retrieval/8/generated"]
    assert row["low"] <= row["difference"] <= row["high"] and 0 <= row["p_two_sided"] <= 1
    assert set(results["seconds"]) == {*STAGES} - {"export"} and results["versions"]["torch"] == torch.__version__
    assert check_recipe(results["recipe"]) == load_recipe(finished / "recipe.yaml")
    assert "recipe" not in read(finished / "export" / "results.json"), "it has local paths"


def test_results_and_card_agree(finished: Path) -> None:
    """And with the export's config; `verify` compares that with the plan, the heads and the card."""
    config, results = read(finished / "export" / "config.json"), read(finished / "results.json")
    card = (finished / "export" / "README.md").read_text()
    assert results["heads"] == [f"L{site['layer']}H{head}" for site in config["splice"] for head in site["heads"]]
    for arm in results["arms"].values():
        assert f"{arm['kv_retrieval']['8']['accuracy']:.3f}" in card and f"{arm['perplexity']:.3f}" in card


def test_finished_stages_are_skipped_and_a_changed_section_reruns_its_stage(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    run = tmp_path / "runs" / "quickstart"
    again = run_small(tmp_path)
    assert again.stdout.count("skipped: already finished with the same inputs") == 7, again.stderr
    shown = surgery("show", "quickstart", cwd=tmp_path).stdout
    alone = surgery("plan", str(RECIPE), *SMALL, cwd=tmp_path)
    assert "plan  done" in alone.stdout and "locate" not in alone.stdout, alone.stderr

    # With more pairs in training, the verdict of the new recipe would be on 8 pairs; results stay those of the old one.
    partial = run_small(tmp_path, "train.sources.0.pairs=[4, 8]", options=("--to", "plan"))
    assert partial.returncode == 0 and "[4, 8]" in partial.stdout, partial.stderr
    assert "KV-retrieval, 4 pairs" in shown and surgery("show", "quickstart", cwd=tmp_path).stdout == shown

    # Without the control, nothing of it is left.
    done = run_small(tmp_path, "train.control=false", "evaluate.examples=4")
    assert [line.split()[0] for line in done.stdout.splitlines() if "skipped" in line] == STAGES[:4]
    results = read(run / "results.json")
    assert set(results["arms"]) == {"base", "hybrid_heads_off", "hybrid"} and not list(run.rglob("*no_splice*"))
    assert results["arms"]["base"]["letter_choice"]["n"] == 4


def test_what_a_run_folder_does_not_fit_is_refused(finished: Path, tmp_path: Path) -> None:
    """A stage without its input, or with one that was made otherwise; the folder of another recipe."""
    line = refused("train", str(RECIPE), *SMALL, cwd=tmp_path)
    assert "needs locate" in line and "Run it first" in line and not (tmp_path / "runs").exists()
    shutil.copytree(finished.parent, tmp_path / "runs")
    run = tmp_path / "runs" / "quickstart"
    assert "train" in refused("export", str(RECIPE), *SMALL, "train.steps=1000", cwd=tmp_path)
    assert "1000" not in (run / "recipe.yaml").read_text()
    assert (run / "results.json").exists()


def wait_for(folder: Path, pattern: str, process: processes.Started) -> None:
    """Until a path is in the folder."""
    deadline = time.time() + 240
    while not list(folder.glob(pattern)):
        assert process.running and time.time() < deadline, process.wait().stderr
        time.sleep(0.01)


def test_killed_inside_training_it_ends_as_if_it_were_not(finished: Path, tmp_path: Path) -> None:
    """Nothing could clean up. The second command has a new interpreter, with another order of hashed strings.

    `make kills` interrupts every stage. While the first runs, its folder takes no other command.
    """
    first = processes.start(("surgery", "run", str(RECIPE), *SMALL), tmp_path)
    runs, run = tmp_path / "runs", tmp_path / "runs" / "quickstart"
    wait_for(runs, ".quickstart.lock", first)
    others = (("run", str(RECIPE), *SMALL, "train.optimizer.lr=1e-5"), ("compare", str(BASE), "name=quickstart"))
    for command in others:
        line = refused(*command, cwd=tmp_path)
        assert "folder: runs/quickstart" in line and f"Process {first.pid}" in line and first.running
    wait_for(run, "steps/*/step_000002", first)
    first.kill(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL and not (run / "trained").exists()

    command = [sys.executable, "-m", "surgery", "run", str(RECIPE), *SMALL]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    resumed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0 and "locate  skipped" in resumed.stdout, resumed.stderr
    assert not list(runs.rglob(".*.tmp")) and not (runs / ".quickstart.lock").exists()
    for name in ("heads.json", "plan.json", "splice.json", "training.json", "trained/model.safetensors"):
        if name == "training.json":
            steps = [[{k: v for k, v in s.items() if k != "seconds"} for s in read(r / name)] for r in (run, finished)]
            assert steps[0] == steps[1]
        else:
            assert (run / name).read_bytes() == (finished / name).read_bytes(), name
    assert read(run / "results.json")["arms"] == read(finished / "results.json")["arms"]
    ours, theirs = (fingerprints(folder / "export") for folder in (run, finished))
    timed = {name for name in ours if name in ("results.json", "report.html") or name.startswith("figures/")}
    assert {k: v for k, v in ours.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}


def test_a_stopped_command_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The signal comes while a model is written."""
    for number in (signal.SIGINT, signal.SIGTERM):
        code = f"""if True:
            import signal, sys
            import surgery.models.convert as convert
            from surgery import cli
            def stop(folder, *_):
                (folder / "half").write_text("x")
                signal.raise_signal({int(number)})  # in this thread: one sent to the process may arrive later
                raise AssertionError("the signal was not heard")
            convert.write_shards = stop
            sys.argv = ["surgery", "convert", {str(BASE)!r}, "runs/new"]
            cli.main()"""
        done = processes.run(["-c"], tmp_path, script=code)
        assert (done.returncode, "Traceback" in done.stderr) == (128 + number, False), done.stderr
        assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    ends = ("train.plateau={window: 1, patience: 1, min_steps: 1}", "train.optimizer={schedule: wsd, warmup: 1}")
    done = run_small(tmp_path, *ends, options=("--dry-run",))
    assert done.returncode == 0 and "new parameters" in done.stdout, done.stderr
    assert "6 at most, fewer if a plateau is found" in done.stdout and done.stdout.count("at most") == 2
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_libraries_are_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    begin = "print('begun', flush=True); from surgery.__main__ import main; main()"
    command = [sys.executable, "-c", begin, "run", str(RECIPE), *SMALL]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"  # Python itself has started
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors in ("", "stopped; run the same command to go on\n"), errors
