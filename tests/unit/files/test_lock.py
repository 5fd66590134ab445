"""One process at a time writes into a folder, whoever was killed before."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from surgery.errors import RunError
from surgery.files import lock
from surgery.files.atomic import new_folder
from surgery.files.lock import hold
from tests.support.processes import leftover

FORK = multiprocessing.get_context("fork")


@contextmanager
def other(folder: Path) -> Iterator[BaseProcess]:
    """Another process that holds the folder."""
    mine, its = FORK.Pipe()  # not an Event: setting one waits for those that were killed while they waited

    def work() -> None:
        with hold(folder):
            its.send("held")
            its.poll(60)

    process = FORK.Process(target=work)
    process.start()
    assert mine.poll(60)
    try:
        yield process
    finally:
        mine.send("done")
        process.join()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuses(folder: Path, says: str, field: str = "folder") -> None:
    with pytest.raises(RunError, match=says), hold(folder, field):
        pytest.fail("it is held")


def test_a_folder_is_held_and_released_without_a_trace(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with hold(folder):
        assert entries(tmp_path / "runs") == [".a.lock"]
    assert entries(tmp_path) == []
    with hold(folder):
        folder.mkdir()
    assert entries(tmp_path / "runs") == ["a"]


def test_a_folder_that_is_held_is_refused_in_another_process_and_in_this_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with other(tmp_path / "a") as process:
        for name in ("a", "link"):
            refuses(tmp_path / name, rf"Process {process.pid} on .*\.a\.lock")
        with hold(tmp_path / "b"):
            pass
    with hold(tmp_path / "a"):
        refuses(tmp_path / "a", f"Process {os.getpid()}")
    assert entries(tmp_path) == ["a", "link"]


def test_the_lock_of_a_killed_process_is_taken_over_and_its_leftovers_are_swept(tmp_path: Path) -> None:
    with other(tmp_path / "a") as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for name in ("a", "b"):
            leftover(tmp_path / name)
        assert (tmp_path / ".a.lock").is_file()
        with hold(tmp_path / "a"):
            assert json.loads((tmp_path / ".a.lock").read_text())["pid"] == os.getpid()
    assert entries(tmp_path) == [".b.surgery-5.tmp"]


def test_the_lock_of_another_machine_is_respected_until_its_file_is_deleted(tmp_path: Path) -> None:
    file = tmp_path / ".a.lock"
    file.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    refuses(tmp_path / "a", f"Process 1 on elsewhere .* delete {file}")
    assert json.loads(file.read_text())["host"] == "elsewhere"
    file.unlink()
    with hold(tmp_path / "a"):
        pass


def test_a_lock_that_this_toolkit_did_not_write_is_left_alone(tmp_path: Path) -> None:
    """Whatever lies there: text, a link to something or to nothing, a second name, a pipe, a folder."""
    lock, dear = tmp_path / ".a.lock", tmp_path / "dear"
    dear.write_text("{}")
    for number, make in enumerate(
        (
            lambda: lock.write_text("notes"),
            lambda: lock.write_text('{"pid": "x"}'),
            lambda: lock.symlink_to(dear),
            lambda: lock.symlink_to(tmp_path / "none"),
            lambda: os.link(dear, lock),
            lambda: os.mkfifo(lock),
            lambda: lock.mkdir(),
        )
    ):
        make()
        before = os.lstat(lock)
        refuses(tmp_path / "a", r"\.a\.lock")
        assert os.path.samestat(before, os.lstat(lock)) and before.st_size == os.lstat(lock).st_size, number
        assert entries(tmp_path) == [".a.lock", "dear"] and dear.read_text() == "{}"
        lock.rmdir() if lock.is_dir() and not lock.is_symlink() else lock.unlink()
    lock.touch()  # of a process that was killed before it wrote its name
    with hold(tmp_path / "a"):
        pass
    assert entries(tmp_path) == ["dear"]


def test_a_folder_that_may_not_be_written_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (errno.EACCES, errno.EROFS):
        with pytest.raises(RunError, match=r"^FOLDER: .*/a\. .*Set a folder that"), hold(tmp_path / "a", "FOLDER"):
            raise OSError(error, os.strerror(error), str(tmp_path / "a" / "x"))
        monkeypatch.setattr(lock, "open_regular", lambda *_, e=error: (_ for _ in ()).throw(OSError(e, os.strerror(e))))
        refuses(tmp_path / "a", r"^FOLDER: .*/a\. .*Set a folder that", "FOLDER")
        monkeypatch.undo()


def test_a_name_that_is_too_long_is_that_of_the_folder(tmp_path: Path) -> None:
    """Also one that fits itself, but not with what is added for its lock or for a temporary folder."""
    for length in (300, 250, 240):
        folder = tmp_path / ("a" * length)
        with (
            pytest.raises(RunError, match=rf"/a{{{length}}}(\.|:) Its name is too long"),
            hold(folder),
            new_folder(folder),
        ):
            pass
    assert entries(tmp_path) == []


def test_where_nothing_can_be_written_beside_the_folder_the_lock_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(lock.os, "access", lambda path, mode: False)
    with hold(tmp_path / "a"):
        assert entries(tmp_path / "a") == [".lock"] and entries(tmp_path) == ["a"]
    assert entries(tmp_path / "a") == []


def test_on_a_file_system_without_locks_a_holder_that_is_alive_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with hold(tmp_path / "a"):
        refuses(tmp_path / "a", str(os.getpid()))
    gone = FORK.Process(target=lambda: None)
    gone.start()
    gone.join()
    (tmp_path / ".a.lock").write_text(json.dumps({"pid": gone.pid, "host": socket.gethostname()}))
    with hold(tmp_path / "a"):
        pass


def test_many_processes_never_hold_it_together(tmp_path: Path) -> None:
    """Each makes a folder while it holds the lock, which fails where another is inside."""

    def work() -> None:
        held = 0
        while held < 30:
            try:
                with hold(tmp_path / "runs" / "a"):
                    (tmp_path / "inside").mkdir()
                    (tmp_path / "inside").rmdir()
                    held += 1
            except RunError:
                pass

    processes = [FORK.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert not list(tmp_path.rglob("*.lock")) and not (tmp_path / "inside").exists()


def test_a_full_disk_is_one_line_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run folder: .*a\. The disk is full"), hold(tmp_path / "a", "run folder"):
        raise OSError(errno.ENOSPC, "No space left on device")
    for error in (OSError(errno.EACCES, "denied"), KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), hold(tmp_path / "a"):
            raise error
    assert entries(tmp_path) == []
