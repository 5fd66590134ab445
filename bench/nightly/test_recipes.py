"""Dry runs of every recipe at its true size, quick and light, offline from the configs kept in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surgery.recipe import load_recipe
from surgery.run.dry_run import dry_run
from tests.integration.test_recipes import LOADED, OPERATIONS, RECIPES, assert_complete
from tests.support import processes

# Those whose dry run is timed and weighed, each in a process of its own. The times are of a busy machine.
TIMED = ("mamba2-2.7b", "zamba2-7b")
SECONDS, GIB = 240, 4.0


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - set(TIMED)))
def test_dry_runs_from_the_kept_config(name: str, tmp_path: Path) -> None:
    """With one short document a step: the shapes are the real ones."""
    path = RECIPES[name]
    read = "attention: 1.0, " if LOADED[name].train.read_steps else ""
    source = f"{{task: kv_retrieval, rows: 1, pairs: [4, 4], weights: {{answer: 1.0, {read}base_kl: 1.0}}}}"
    recipe = load_recipe(path, [f"train.sources=[{source}]"])
    assert_complete(dry_run(recipe, tmp_path / name, path), recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TIMED)
def test_a_dry_run_at_true_size_is_quick_and_light(name: str, tmp_path: Path) -> None:
    """Unchanged, as a user runs it, without a network."""
    code = (
        "import json, resource, sys, time; from pathlib import Path\n"
        "from surgery.commands.tables import print_plan\n"
        "from surgery.run.dry_run import dry_run\n"
        "from surgery.recipe import load_recipe\n"
        "path = Path(sys.argv[1]); began = time.process_time()\n"
        "found = dry_run(load_recipe(path), Path('runs/x'), path); print_plan(found)\n"
        "found |= {'seconds': time.process_time() - began}\n"
        "found |= {'gib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}\n"
        "print(json.dumps(found, default=str))\n"
    )
    done = processes.start(["-c", str(RECIPES[name])], tmp_path, script=code).wait(SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert_complete(found, load_recipe(RECIPES[name]))
    assert found["seconds"] < 60 and found["gib"] < GIB
    assert found["fits"]["fits"], f"{name} does not fit its own hardware"
    assert not list(tmp_path.iterdir())
    for word in (
        "new parameters",
        "trainable parameters",
        "FLOPs",
        "activations",
        "GiB left",
        "128k tokens",
        "locating",
        "scan by",
    ):
        assert word in done.stdout
