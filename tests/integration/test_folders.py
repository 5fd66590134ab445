"""No command replaces what this toolkit did not write, or what it reads; no two commands write into one folder."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from surgery.files.ownership import MARK, mark
from tests.integration.conftest import BASE, RECIPE, ROOT, SMALL, run_small, surgery
from tests.support.errors import assert_refused
from tests.support.processes import library

ANALYSIS = str(ROOT / "recipes" / "pico-reproduce.yaml")
PRETRAIN = str(ROOT / "recipes" / "pretrain-pico.yaml")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": ("run", str(RECIPE), *SMALL, "name=x", "seed=7", "--runs", ".", "--overwrite"),
    "analyse": (
        "analyse",
        ANALYSIS,
        f"base.model={BASE}",
        "sweeps=[{kind: prune}]",
        "name=x",
        "--runs",
        ".",
        "--overwrite",
    ),
    "compare": ("compare", str(BASE), "name=x", "--runs", "."),
    "convert": ("convert", str(BASE), "x", "--overwrite"),
    "pretrain": ("pretrain", PRETRAIN, "--to", "x", "--overwrite"),
}
KINDS = ("run", "analysis", "comparison", "model", "export")
OWN = {"run": "run", "analyse": "analysis", "compare": "comparison", "convert": "model", "pretrain": "model"}


def fill(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make(folder: Path, kind: str) -> None:
    """A folder of some kind, with something dear in it."""
    fill(folder, notes_dot_txt="years of work", figures__a_dot_png="drawn", recipe_dot_yaml="name: x\nseed: 0\n")
    if kind == "export":
        fill(folder, export_dot_json='{"format": "x", "versions": {}, "files": {}}')
    elif kind != "foreign":
        mark(folder, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(("command", "kind"), [(c, k) for c in COMMANDS for k in ("foreign", *KINDS) if k != OWN[c]])
def test_what_a_command_did_not_write_it_does_not_replace(tmp_path: Path, command: str, kind: str) -> None:
    make(tmp_path / "x", kind)
    before = tree(tmp_path)
    done = surgery(*COMMANDS[command], cwd=tmp_path)
    assert_refused(done, "x. The folder is not empty, and is not a", "nother")
    assert "--overwrite" not in done.stderr
    assert tree(tmp_path) == before


READ = {
    "base.model": ("run", "base.model=x/m"),
    "base.tokenizer": ("run", "base.tokenizer=x/m"),
    "train.teacher.model": ("run", "train.teacher={model: x/m}", "train.sources.0.weights.distil=1.0"),
    "splice.teacher.model": ("run", "splice.init=teacher", "splice.teacher={model: x/m}"),
    "control.model": ("run", "splice=null", "control={model: x/m}"),
    "train.sources.0.data.path": (
        "run",
        "train.sources=[{data: {path: x/m/rows.jsonl}, rows: 1, weights: {answer: 1.0}}]",
    ),
    "teacher.model": ("analyse", "teacher={model: x/m}", "sweeps=[{kind: prune}, {kind: swap_one}]"),
    "sweeps.1.heads": ("analyse", "sweeps=[{kind: prune}, {kind: disable_one, heads: x/m/heads.json}]"),
    "models.1": ("compare", "x/m"),
}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("field", READ)
def test_what_a_command_reads_it_does_not_replace(tmp_path: Path, field: str, linked: bool) -> None:
    command, *given = READ[field]
    make(tmp_path / "x", OWN[command])
    fill(tmp_path / "x" / "m", config_dot_json="{}", rows_dot_jsonl="{}\n", heads_dot_json="{}")
    if linked:
        (tmp_path / "elsewhere").symlink_to(tmp_path / "x")
        given = [word.replace("x/m", "elsewhere/m") for word in given]
    before = tree(tmp_path)
    name, *rest = COMMANDS[command]
    options = next(i for i, word in enumerate(rest) if word.startswith("--"))
    done = surgery(name, *rest[:options], *given, *rest[options:], cwd=tmp_path)
    assert_refused(done, f"older: x. {field} (", "is inside it", "nother")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", ["run", "analyse", "pretrain"])
def test_the_recipe_is_not_removed_with_the_folder_that_it_is_in(tmp_path: Path, command: str) -> None:
    make(tmp_path / "x", OWN[command])
    name, recipe, *rest = COMMANDS[command]
    (tmp_path / "x" / "mine.yaml").write_text(Path(recipe).read_text())
    before = tree(tmp_path)
    assert_refused(surgery(name, "x/mine.yaml", *rest, cwd=tmp_path), "x. recipe (x/mine.yaml) is inside it")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_the_current_directory_is_not_removed(tmp_path: Path, command: str) -> None:
    make(tmp_path / "x", OWN[command])
    fill(tmp_path / "x" / "here", a="")
    place = {".": "../..", "x": "../../x"}
    given = [place.get(word, word) for word in COMMANDS[command]]
    before = tree(tmp_path)
    assert_refused(surgery(*given, cwd=tmp_path / "x" / "here"), "current directory is inside it")
    assert tree(tmp_path) == before


def test_a_fine_tuning_does_not_remove_the_export_that_it_starts_from(tmp_path: Path) -> None:
    """Nor is that suggested."""
    make(tmp_path / "runs" / "finetune-rows", "run")
    fill(tmp_path / "runs" / "finetune-rows" / "export", config_dot_json="{}")
    fill(tmp_path, rows_dot_jsonl="{}\n")
    before = tree(tmp_path)
    for options in ((), ("--overwrite",)):
        done = surgery("finetune", "runs/finetune-rows/export", "rows.jsonl", *options, cwd=tmp_path)
        told = "run folder: runs/finetune-rows. base.model (runs/finetune-rows/export)"
        assert_refused(done, told, "name=finetune-rows-2")
        assert "--overwrite" not in done.stderr and tree(tmp_path) == before


def test_a_teacher_may_not_be_what_the_same_run_writes(finished: Path, tmp_path: Path) -> None:
    """The folder is the recipe's own: nothing is removed, but `trained` would be replaced."""
    shutil.copytree(finished.parent, tmp_path / "runs")
    before = tree(tmp_path)
    given = ("train.teacher={model: runs/quickstart/trained}", "train.sources.0.weights.distil=1.0")
    assert_refused(run_small(tmp_path, *given), "quickstart/trained. train.teacher.model", "is inside it")
    assert tree(tmp_path) == before


def test_overwrite_leaves_what_no_run_writes(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "quickstart"
    make(folder, "run")
    fill(folder, other__kept_dot_txt="dear")
    done = run_small(tmp_path, "seed=7", "locate.methods=[ablation]", "splice.select=ablation",
                     options=("--overwrite", "--to", "locate"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "notes.txt").is_file() and (folder / "other" / "kept.txt").is_file()
    assert not (folder / "figures" / "a.png").exists()
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["seed"] == 7


def test_a_comparison_replaces_a_comparison(tmp_path: Path) -> None:
    few = ("evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[2]", "evaluate.examples=2")
    for count in (2, 3):
        done = surgery("compare", str(BASE), *few[:2], f"evaluate.examples={count}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "runs" / "compare" / "results.json").read_text())
        assert results["arms"][BASE.name]["kv_retrieval"]["2"]["n"] == count
        assert [p.name for p in (tmp_path / "runs").iterdir()] == ["compare"]
    (tmp_path / "runs" / "compare" / MARK).unlink()
    assert_refused(surgery("compare", str(BASE), *few, cwd=tmp_path), "is not a comparison of this toolkit")


def test_two_runs_of_one_folder_at_once(tmp_path: Path) -> None:
    """The second is refused before it reads anything; the first ends as if it were alone."""
    first = library().start(("surgery", "run", str(RECIPE), *SMALL, "--to", "train"), tmp_path)
    lock, deadline = tmp_path / "runs" / ".quickstart.lock", time.time() + 120
    while not lock.is_file() and first.running and time.time() < deadline:
        time.sleep(0.01)
    second = run_small(tmp_path, "train.optimizer.lr=1e-5", options=("--to", "train"))
    other = surgery("compare", str(BASE), "name=quickstart", cwd=tmp_path)
    assert first.running, "the first ended before the second began"
    assert_refused(second, "run folder: runs/quickstart", f"Process {first.pid}")
    assert_refused(other, "folder: runs/quickstart", f"Process {first.pid}")
    ended = first.wait()
    assert ended.returncode == 0, ended.stderr
    assert not lock.exists()
    stored = yaml.safe_load((tmp_path / "runs" / "quickstart" / "recipe.yaml").read_text())
    assert stored["train"]["optimizer"]["lr"] == yaml.safe_load(RECIPE.read_text())["train"]["optimizer"]["lr"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing_half_written_and_no_traceback(tmp_path: Path, number: int) -> None:
    """The signal comes while a model is written; `make kills` tries every stage."""
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
    done = library().run(["-c"], tmp_path, script=code)
    assert (done.returncode, "Traceback" in done.stderr) == (128 + number, False), done.stderr
    assert not list(tmp_path.iterdir())
