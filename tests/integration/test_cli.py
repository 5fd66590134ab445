"""The other commands, and two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from tests.integration.conftest import BASE, RECIPE, ROOT, SMALL, run_small, surgery
from tests.support.errors import assert_refused


def test_inspect_names_mixers_and_bytes(finished: Path, tmp_path: Path) -> None:
    base = surgery("inspect", str(BASE), cwd=tmp_path)
    assert base.returncode == 0 and "backbone.layers.3.mixer" in base.stdout
    hybrid = surgery("inspect", str(finished / "export"), cwd=tmp_path)
    assert hybrid.returncode == 0 and "spliced heads" in hybrid.stdout


def test_validate_prints_the_recipe_in_full(tmp_path: Path) -> None:
    done = surgery("validate", str(RECIPE), "train.steps=17", cwd=tmp_path)
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["train"]["steps"] == 17


def test_schema_is_json_schema(tmp_path: Path) -> None:
    schema = json.loads(surgery("schema", cwd=tmp_path).stdout)
    assert {"name", "base", "locate", "splice", "train", "evaluate", "export"} <= set(schema["properties"])


def test_generate_goes_on_with_the_prompt(finished: Path, tmp_path: Path) -> None:
    prompt = "Question: What is the job of"
    done = surgery("generate", str(finished / "export"), prompt, "--max-new-tokens", "3", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(prompt) and len(done.stdout) > len(prompt)


def test_quiet_and_verbose(finished: Path, tmp_path: Path) -> None:
    """Quiet prints what was asked for alone. Both together are refused."""
    prompt = "Question: What is the job of"
    command = ("generate", str(finished / "export"), prompt, "--max-new-tokens", "3")
    assert surgery("-q", *command, cwd=tmp_path).stdout == surgery("-v", *command, cwd=tmp_path).stdout
    assert_refused(surgery("-q", "-v", *command, cwd=tmp_path), "--quiet", "--verbose")
    said = "Before a prompt with a dash write --: generate CHECKPOINT -- PROMPT"
    assert_refused(surgery("generate", "none", "-5 + 3", cwd=tmp_path), said)
    for option in ("-q", "--verbose", "--debug"):
        done = surgery(*command, option, cwd=tmp_path)
        assert_refused(done, f"{option}: Put it before the command: surgery {option} {command[0]}")


def test_help_names_every_stage(tmp_path: Path) -> None:
    text = surgery("--help", cwd=tmp_path).stdout
    for command in ("run", "locate", "plan", "splice", "train", "evaluate", "export", "inspect", "generate", "schema"):
        assert command in text


def test_pretrain_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "pretrain-pico.yaml"
    small = ["train.steps=2", "evaluate.examples=4", "evaluate.sentences=4", "evaluate.pairs=[4]"]
    done = surgery("pretrain", str(recipe), *small, "--to", "made", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert surgery("inspect", "./made", cwd=tmp_path).returncode == 0
    assert "surgery pretrain" in (tmp_path / "made" / "README.md").read_text()
    assert not (tmp_path / "made.steps").exists()


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """Rank 0 writes the run folder; both ranks train on their share of every batch."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    shared = ("locate.batch_size=4",)
    command = [*torchrun, "-m", "surgery", "run", str(RECIPE), *SMALL, *shared, "--to", "train", "train.steps=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("train  done") == 1
    weights = load_file(tmp_path / "runs" / "quickstart" / "trained" / "model.safetensors")
    assert all(bool(torch.isfinite(w).all()) for w in weights.values())
    alone = tmp_path / "alone"
    alone.mkdir()
    assert run_small(alone, *shared, options=("--to", "locate")).returncode == 0
    heads = [(path / "runs" / "quickstart" / "heads.json").read_text() for path in (tmp_path, alone)]
    assert heads[0] == heads[1], "both processes measured half of the prompts; the result is that of one"


def test_locate_alone_says_what_it_found(tmp_path: Path) -> None:
    """Any method by itself; nothing beyond what was asked for."""
    done = surgery("locate", str(RECIPE), *SMALL, "locate.methods=[ablation]", "splice.select=ablation", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "quickstart"
    heads = json.loads((folder / "heads.json").read_text())
    assert (
        set(heads["heads"][0]["scores"]) == {"ablation", "ablation_accuracy"}
        and heads["heads"][0]["role"] == "unmeasured"
    )
    assert heads["heads"][0]["head"] in done.stdout
    assert all(text in done.stdout for text in ("locate.html", "forward passes", "held on a device"))
    assert (folder / "locate.html").stat().st_size > 10_000 and (folder / "heads.csv").read_text().count("\n") == 33
    (tmp_path / "x").mkdir()
    only = ("locate.methods=[ablation]", "splice.select=ablation")
    whole = surgery("run", str(RECIPE), *SMALL, *only, cwd=tmp_path / "x")
    assert whole.returncode == 2 and "Add sharpen" in whole.stderr and not (tmp_path / "x" / "runs").exists()
    settings = (*SMALL, "locate.methods=[ablation]", "splice.select=ablation")
    again = surgery("--quiet", "locate", str(RECIPE), *settings, cwd=tmp_path)
    assert again.returncode == 0 and "locate.html" in again.stdout and "measuring" not in again.stdout
    assert (folder / "run.log").read_text().count("locate  measuring every head") == 2
    refused = surgery("plan", str(RECIPE), *SMALL, "locate.methods=[ablation]", "splice.select=ablation", cwd=tmp_path)
    assert refused.returncode == 2 and "Add sharpen to locate.methods" in refused.stderr


def test_a_closed_or_broken_output_follows_the_conventions_of_the_shell(tmp_path: Path) -> None:
    """Nobody reads: 141 without a word. Closed: as /dev/null, and no file of the command takes the number."""
    command = f"{sys.executable} -m surgery"
    for words, code in (
        (f"{command} schema | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{command} --help 2>&1 | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{command} show nothing 2>&1 | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{command} recipes <&- >&-", 0),
        (f"{command} show nothing <&- >&- 2>&-", 2),
    ):
        done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", ""), words
