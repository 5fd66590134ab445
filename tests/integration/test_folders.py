"""No command replaces what this toolkit did not write, or what it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from surgery.files.ownership import mark
from tests.integration.conftest import BASE, QUICK, RECIPE, ROOT, ran, refused, run_small

ANALYSIS = str(ROOT / "recipes" / "pico-reproduce.yaml")
PRETRAIN = str(ROOT / "recipes" / "pretrain-pico.yaml")
PRUNE = (f"base.model={BASE}", "sweeps=[{kind: prune}]")
# Each command, the kind of folder that it writes, and its arguments before and after overrides. It writes into x.
COMMANDS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "run": ("run", (str(RECIPE), *QUICK, "name=x", "seed=7"), ("--runs", ".", "--overwrite")),
    "analyse": ("analysis", (ANALYSIS, *PRUNE, "name=x"), ("--runs", ".", "--overwrite")),
    "compare": ("comparison", (str(BASE), "name=x"), ("--runs", ".")),
    "convert": ("model", (str(BASE), "x"), ("--overwrite",)),
    "pretrain": ("model", (PRETRAIN,), ("--to", "x", "--overwrite")),
}


def command(name: str, *overrides: str) -> tuple[str, ...]:
    _, words, options = COMMANDS[name]
    return name, *words, *overrides, *options


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make(folder: Path, kind: str) -> None:
    """A folder of some kind, with something dear in it."""
    write(folder, {"notes.txt": "years of work", "figures/a.png": "drawn", "recipe.yaml": "name: x\nseed: 0\n"})
    if kind == "export":
        write(folder, {"export.json": '{"format": "x", "versions": {}, "files": {}}'})
    elif kind != "foreign":
        mark(folder, kind)  # type: ignore[arg-type]


def assert_kept(folder: Path, words: tuple[str, ...], *expected: str, cwd: Path | None = None) -> None:
    before = tree(folder)
    line = refused(*words, cwd=cwd or folder)
    assert [word for word in expected if word not in line] == [], (words, line)
    assert tree(folder) == before, words


def test_what_a_command_did_not_write_it_does_not_replace(tmp_path: Path) -> None:
    for kind in ("foreign", "run", "analysis", "comparison", "model", "export"):
        place = tmp_path / kind
        make(place / "x", kind)
        for name in COMMANDS:
            if kind != COMMANDS[name][0]:
                assert_kept(place, command(name), "x. The folder is not empty, and holds no ", "nother")
    (tmp_path / "run" / "x").rename(tmp_path / "run" / "quickstart-sweep")
    sweep = ("sweep", str(RECIPE), *QUICK, "splice.num_heads=0,1", "--runs", ".", "--overwrite")
    assert_kept(tmp_path / "run", sweep, "quickstart-sweep. The folder is not empty, and holds no sweep")


def test_what_a_command_reads_it_does_not_replace(tmp_path: Path) -> None:
    rows = "train.sources=[{data: {path: x/m/rows.jsonl}, rows: 1, weights: {answer: 1.0}}]"
    reads = {
        "base.model": ("run", "base.model=x/m"),
        "base.tokenizer": ("run", "base.tokenizer=x/m"),
        "train.teacher.model": ("run", "train.teacher={model: x/m}", "train.sources.0.weights.distil=1.0"),
        "splice.teacher.model": ("run", "splice.init=teacher", "splice.teacher={model: x/m}"),
        "control.model": ("run", "splice=null", "control={model: x/m}"),
        "train.sources.0.data.path": ("run", rows),
        "teacher.model": ("analyse", "teacher={model: x/m}", "sweeps=[{kind: prune}, {kind: swap_one}]"),
        "sweeps.1.heads": ("analyse", "sweeps=[{kind: prune}, {kind: disable_one, heads: x/m/heads.json}]"),
        "models.1": ("compare", "x/m"),
    }
    for field, (name, *given) in reads.items():
        place = tmp_path / field
        make(place / "x", COMMANDS[name][0])
        write(place / "x" / "m", {"config.json": "{}", "rows.jsonl": "{}\n", "heads.json": "{}"})
        assert_kept(place, command(name, *given), f"older: x. {field} (", "is inside it", "nother")
        (place / "elsewhere").symlink_to(place / "x")
        linked = [word.replace("x/m", "elsewhere/m") for word in given]
        assert_kept(place, command(name, *linked), f"older: x. {field} (", "is inside it", "nother")


def test_neither_the_current_directory_nor_the_recipe_nor_the_base_is_removed(tmp_path: Path) -> None:
    for name, (kind, words, options) in COMMANDS.items():
        place = tmp_path / name
        make(place / "x", kind)
        write(place / "x" / "here", {"a": ""})
        given = [{".": "../..", "x": "../../x"}.get(word, word) for word in command(name)]
        assert_kept(place, tuple(given), "current directory is inside it", cwd=place / "x" / "here")
        if words[0].endswith(".yaml"):
            write(place / "x", {"mine.yaml": Path(words[0]).read_text()})
            own = (name, "x/mine.yaml", *words[1:], *options)
            assert_kept(place, own, "x. recipe (x/mine.yaml) is inside it")
    make(tmp_path / "runs" / "finetune-rows", "run")
    write(tmp_path, {"rows.jsonl": "{}\n", "runs/finetune-rows/export/config.json": "{}"})
    for options in ((), ("--overwrite",)):
        words = ("finetune", "runs/finetune-rows/export", "rows.jsonl", *options)
        told = "run folder: runs/finetune-rows. base.model (runs/finetune-rows/export)"
        assert_kept(tmp_path, words, told, "name=finetune-rows-2")


def test_overwrite_removes_what_a_run_writes_and_leaves_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "quickstart"
    make(folder, "run")
    write(folder, {"other/kept.txt": "dear"})
    run_small(tmp_path, "seed=7", "locate.methods=[ablation]", "splice.select=ablation",
                     options=("--overwrite", "--to", "locate"))  # fmt: skip
    assert (folder / "notes.txt").is_file() and (folder / "other" / "kept.txt").is_file()
    assert not (folder / "figures" / "a.png").exists()
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["seed"] == 7


def test_a_comparison_replaces_a_comparison(tmp_path: Path) -> None:
    few = ("evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[2]")
    for count in (2, 3):
        ran("compare", str(BASE), *few, f"evaluate.examples={count}", cwd=tmp_path)
        results = json.loads((tmp_path / "runs" / "compare" / "results.json").read_text())
        assert results["arms"][BASE.name]["kv_retrieval"]["2"]["n"] == count
        assert [p.name for p in (tmp_path / "runs").iterdir()] == ["compare"]
