"""Run folders: whole or absent, fresh or not, mine or another's."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from surgery.errors import RunError
from surgery.files import atomic
from surgery.files.atomic import digest, new_folder, read_json, sweep, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import MARK, Kind, check_apart, check_replaceable, kind_of, mark, remove
from surgery.recipe import check_recipe
from surgery.run.folder import WRITTEN, RunDir
from tests.support.cases import each
from tests.support.processes import leftover

RECIPE = "name: a\nseed: 0\nbase:\n  model: m\nlocate:\n  pairs: 8\n"


class Killed(BaseException):
    """Stands for a signal: no `except Exception` catches it."""


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden entries too."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def raise_killed(*_: Any, **__: Any) -> None:
    raise Killed


@each("step", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write_text(tmp_path / "x", "old")
    monkeypatch.setattr(os, step, raise_killed)
    with pytest.raises(Killed):
        write_text(tmp_path / "x", "new")
    monkeypatch.undo()
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


@each("value", [math.nan, math.inf, -math.inf])
def test_json_refuses_what_is_no_number(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=r"(?i)json"):
        write_json(tmp_path / "x.json", {"loss": value})
    assert names(tmp_path) == []


def fill(path: Path, text: str) -> None:
    with new_folder(path) as folder:
        (folder / "f").write_text(text)


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
)


@each("error", [ValueError(), KeyboardInterrupt(), Killed(), *FULL])
@each("before", [True, False])
def test_a_failure_leaves_nothing_half_written(tmp_path: Path, error: BaseException, before: bool) -> None:
    """A full disk is one error, whatever library meets it: `FULL` has their words, from a file system of 2 MiB."""
    if before:
        fill(tmp_path / "out", "1")
    expected = RunError if error in FULL else type(error)
    with pytest.raises(expected) as caught, new_folder(tmp_path / "out") as folder:
        (folder / "f").write_text("2")
        raise error
    said = f"{tmp_path / 'out'}: the disk is full. Free some space and run the same command again."
    assert expected is not RunError or (str(caught.value), caught.value.__cause__) == (said, error)
    assert names(tmp_path) == (["out", "out/f"] if before else [])
    assert not before or (tmp_path / "out" / "f").read_text() == "1"


@each("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_between_the_renames_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    fill(tmp_path / "out", "1")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source.name == "new":
            raise error
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises((RunError, KeyboardInterrupt)):
        fill(tmp_path / "out", "2")
    assert names(tmp_path) == ["out", "out/f"] and (tmp_path / "out" / "f").read_text() == "1"


def test_a_kill_at_any_step_leaves_one_of_the_two_folders_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sweep` restores the old one where the kill came between the two renames, and leaves nothing else."""
    for name, at in product(("mkdir", "rename", "fsync", "rmdir", "unlink"), range(3)):
        folder, steps = tmp_path / f"{name}{at}", iter([getattr(os, name)] * at)
        fill(folder / ".v1.2-beta", "1")

        def killed(*given: Any, _steps: Iterator[Any] = steps, **named: Any) -> Any:
            return next(_steps, raise_killed)(*given, **named)

        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(os, name, killed)
            if name not in ("rmdir", "unlink"):  # a killed process tidies nothing
                patch.setattr(atomic, "_discard", raise_killed)
            fill(folder / ".v1.2-beta", "2")
        sweep(folder)
        assert names(folder) == [".v1.2-beta", ".v1.2-beta/f"], name
        assert (folder / ".v1.2-beta" / "f").read_text() in ("1", "2")


def test_sweep_removes_what_a_mark_proves_and_nothing_else(tmp_path: Path) -> None:
    """A stranger's file or folder may have any name, a copy of another mark, or a link to a mark in it."""
    for name in ("x.json", "out"):
        leftover(tmp_path / name)
    (tmp_path / ".y.surgery-9.tmp").mkdir()  # killed before the mark was written
    (tmp_path / "kept").mkdir()
    kept = tmp_path / "kept"
    (kept / ".out.7.tmp").mkdir()
    for name, text in (
        (".out.2024.old", ""),
        (".b.surgery-1.tmp", "{"),
        (".c.surgery-1.tmp", '{"kind": "temporary", "of": "d"}'),
    ):
        write_text(kept / name / MARK, text)
        write_text(kept / name / "thesis", "mine")
    (kept / ".link.surgery-1.tmp").symlink_to(tmp_path / ".out.surgery-5.tmp")
    write_text(kept / ".e.surgery-1.tmp" / "mark", '{"kind": "temporary", "of": "e"}')
    (kept / ".e.surgery-1.tmp" / MARK).symlink_to("mark")
    before = names(kept)
    sweep(kept)
    assert names(kept) == before
    sweep(tmp_path, "out")
    assert {p.name for p in tmp_path.iterdir()} == {"kept", ".x.json.surgery-5.tmp", ".y.surgery-9.tmp"}
    sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"kept"}


def test_nothing_is_written_through_a_link_that_this_toolkit_did_not_make(tmp_path: Path) -> None:
    """Below a folder that is held, at any depth. The folder itself may be the user's link to another disk."""
    write_text(tmp_path / "dear" / "deep" / "a", "mine")
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with hold(tmp_path / "run"):
        for name, target in (("figures", ""), ("file", "deep/a"), ("nothing", "nothing")):
            (tmp_path / "disk" / name).symlink_to(tmp_path / "dear" / target)
        for write in (
            lambda: write_text(tmp_path / "run" / "figures" / "a", "x"),
            lambda: fill(tmp_path / "run" / "figures" / "deep", "x"),
            lambda: sweep(tmp_path / "run" / "figures"),
            lambda: os.close(atomic.open_regular(tmp_path / "run" / "file", os.O_WRONLY | os.O_CREAT)),
            lambda: os.close(atomic.open_regular(tmp_path / "run" / "nothing", os.O_WRONLY | os.O_CREAT)),
        ):
            with pytest.raises(RunError, match=r"run/\w+.*: a symbolic link"):
                write()
        fill(tmp_path / "run" / "figures", "new")
        write_text(tmp_path / "run" / "file", "new")
        atomic.delete(tmp_path / "run" / "nothing")
    assert names(tmp_path / "dear") == ["deep", "deep/a"] and (tmp_path / "dear/deep/a").read_text() == "mine"
    assert names(tmp_path / "disk") == ["figures", "figures/f", "file"]


def test_a_pipe_a_device_or_a_second_name_is_one_line_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_text(tmp_path / "dear", "{}")
    os.link(tmp_path / "dear", tmp_path / "linked")
    for name, flags in (("pipe", os.O_RDONLY), ("pipe", os.O_RDWR), ("linked", os.O_RDWR), ("", os.O_RDONLY)):
        with pytest.raises(RunError, match="Remove it, or replace it with a copy"):
            atomic.open_regular(tmp_path / name, flags)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert atomic.text_or_empty(path) == "" and atomic.read_mapping(path) == {}
        with pytest.raises(RunError, match="not a regular file"):
            read_json(path)
    assert read_json(tmp_path / "linked") == {}


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_digest_is_of_names_and_bytes(tmp_path: Path) -> None:
    base = digest(tree(tmp_path / "1" / "out", a="1", b="2"))
    assert digest(tree(tmp_path / "2" / "out", b="2", a="1")) == base
    others = [
        digest(tree(tmp_path / "3" / "out", a="1", b="3")),
        digest(tree(tmp_path / "4" / "out", a="1", c="2")),
        digest(tree(tmp_path / "5" / "out", a="2", b="1")),
        digest(tree(tmp_path / "6" / "out", a="1")),
        digest(tree(tmp_path / "7" / "out", a="1", b="2", c="")),
        digest(tree(tmp_path / "8" / "out", a="1", x__b="2")),
    ]
    assert len({base, *others}) == len(others) + 1


def test_claim_again_keeps_what_is_there(tmp_path: Path) -> None:
    RunDir(tmp_path / "a").claim(RECIPE)
    write_text(tmp_path / "a" / "heads.json", "{}")
    changed = RECIPE.replace("pairs: 8", "pairs: 9")
    for text in (RECIPE, changed):
        RunDir(tmp_path / "a").claim(text)
        assert names(tmp_path / "a") == [MARK, "heads.json", "recipe.yaml"]
        assert (tmp_path / "a" / "recipe.yaml").read_text() == text


@each("content", ["", "[]", "3", "null", "{}", '{"key": 3}', '"key outputs"', "[" * 100_000, "\0", "{"])
def test_a_manifest_of_another_form_is_named(tmp_path: Path, content: str) -> None:
    run = RunDir(tmp_path)
    run.finish("locate", "key", [], 1.0)
    (tmp_path / ".stages" / "locate.json").write_text(content)
    for look in (run.is_fresh, run.is_finished):
        if content == "null":  # as if the stage had never run
            assert not look("locate", "key", [])
            continue
        with pytest.raises(RunError, match=r"locate\.json"):
            look("locate", "key", [])


def test_a_stage_is_fresh_while_key_and_outputs_are_those_that_it_finished_with(tmp_path: Path) -> None:
    outputs = [tree(tmp_path / "figures", a="1"), tmp_path / "heads.json"]
    run = RunDir(tmp_path)
    changes = {
        "change": lambda: outputs[1].write_text("[]"),
        "add": lambda: (outputs[0] / "b").write_text("2"),
        "remove from a folder": lambda: (outputs[0] / "b").unlink(),
        "remove": lambda: outputs[1].unlink(),
        "forget": lambda: run.forget("locate"),
    }
    for name, change in changes.items():
        write_json(outputs[1], {})
        run.finish("locate", "key", outputs, 1.0)
        assert run.is_fresh("locate", "key", outputs), name
        assert not run.is_fresh("locate", "other", outputs) and not run.is_fresh("train", "key", outputs)
        change()
        assert not run.is_fresh("locate", "key", outputs), name


KINDS: tuple[Kind, ...] = ("run", "analysis", "comparison", "model", "sweep", "checkpoints")


def test_folders_are_known_by_their_mark_and_an_export_by_its_record(tmp_path: Path) -> None:
    for kind in KINDS:
        write_text(tmp_path / kind / "recipe.yaml", "name: a")
        assert kind_of(tmp_path / kind) is None
        with pytest.raises(RunError, match="Set another"):
            check_replaceable("f", tmp_path / kind, kind, {})
        mark(tmp_path / kind, kind)
        assert kind_of(tmp_path / kind) == kind and check_replaceable("f", tmp_path / kind, kind, {})
    write_json(tmp_path / "export" / "export.json", {"format": "x", "versions": {}, "files": {}})
    assert kind_of(tmp_path / "export") == "export" and check_replaceable("f", tmp_path / "export", "export", {})
    write_json(tmp_path / "export" / "export.json", {"format": "x", "versions": {}, "files": {"": {}, "a/b": {}}})
    assert check_replaceable("f", tmp_path / "export", "export", {})
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / MARK).symlink_to(tmp_path / "run" / MARK)
    assert kind_of(tmp_path / "linked") is None


@each("text", ["", "{", "[]", "null", '{"kind": 3}', '{"kind": ["run"]}', '{"kind": "x"}', "[" * 9999])
def test_a_mark_that_is_none(tmp_path: Path, text: str) -> None:
    write_text(tmp_path / MARK, text)
    assert kind_of(tmp_path) is None
    assert kind_of(tmp_path / "missing") is None


@each("given", ["a", "a/", "a/b", "a/../a/b", "link", "link/b", "up/a"])
def test_what_is_read_from_a_folder_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    write_text(tmp_path / "a" / "b", "")
    write_text(tmp_path / "ab" / "b", "")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "up").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "link"):
        with pytest.raises(RunError, match=rf"^FOLDER: {folder}\. base.model \({given}\) is inside it. Move."):
            check_apart(
                "FOLDER", [Path("x"), Path(folder)], {"data": "ab/b", "hub": "org/a", "base.model": given}, "Move."
            )
    check_apart(
        "", [Path("a")], {"near": "ab", "above": ".", "hub": "a/none", "long": "a" * 5000, "home": "~nobody/a"}, ""
    )


def test_a_run_writes_nothing_that_is_not_listed() -> None:
    """What `--overwrite` removes is what every stage writes, and no more."""
    from surgery.run.pipeline import stages_of

    texts = {"base_text": 2, "max_tokens": 8, "weights": {"base_kl": 1.0}}
    train = {"plateau": {}, "optimizer": {"schedule": "wsd"}, "sources": [{"task": "kv_retrieval"}, texts]}
    recipe = check_recipe({"name": "a", "base": {"model": "m"}, "splice": {"state_size": 4}, "train": train})
    written = {name.split("/")[0] for stage in stages_of(recipe) for name in stage.outputs(recipe)}
    of_runs = {".stages", "recipe.yaml", "run.log", "steps", "adapters", "teacher_logits", "logs"}
    assert set(WRITTEN) == written | of_runs


def test_remove_follows_no_link_and_leaves_the_rest(tmp_path: Path) -> None:
    write_text(tmp_path / "elsewhere" / "x", "precious")
    write_text(tmp_path / "a" / "notes", "precious")
    (tmp_path / "a" / "figures").symlink_to(tmp_path / "elsewhere")
    mark(tmp_path / "a", "run")
    remove(tmp_path / "a", WRITTEN)
    assert names(tmp_path) == ["a", "a/notes", "elsewhere", "elsewhere/x"]


def test_a_folder_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    fill(tmp_path / "disk" / "out", "1")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    with hold(tmp_path / "out"):
        fill(tmp_path / "out", "2")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "out" / "f").read_text() == "2"
    assert names(tmp_path) == ["disk", "disk/out", "disk/out/f", "out"]


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name itself afterwards: files, their folders, the rename, the parent."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        rename(source, target)

    fill(tmp_path / "out", "1")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    with new_folder(tmp_path / "out") as folder:
        write = folder / "deep" / "f"
        write.parent.mkdir()
        write.write_text("2")
    moved = events.index(("rename", str(tmp_path / "out")))
    before = {path for what, path in events[:moved] if what == "sync"}
    assert {str(folder), str(folder / "deep"), str(folder / "deep" / "f")} <= before
    assert ("sync", str(tmp_path)) in events[moved:]
