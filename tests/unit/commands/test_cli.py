"""Exit codes: what ends a command, and an output that cannot be written."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from surgery import cli
from surgery.errors import RecipeError, SurgeryError

INVALID = RecipeError("train.steps", 0, "Set 1 or more.")


def end(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, debug: str = "0") -> object:
    """The exit code of a command that this error ends."""

    def command() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(cli, "app", command)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["surgery"])
    monkeypatch.setenv("SURGERY_DEBUG", debug)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_every_end_has_its_code_and_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = "stopped; run the same command to go on\n"
    for error, code, line in (
        (None, 0, ""),
        (SystemExit(), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("a text"), 1, "a text\n"),  # as Python prints it
        (SystemExit(143), 143, stopped),
        (KeyboardInterrupt(), 130, stopped),
        (INVALID, 2, "error: train.steps: 0. Set 1 or more.\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: Permission denied. Set a file or folder"),
        (RuntimeError("No space left on device (os error 28)"), 2, "error: the disk is full"),
        (MemoryError(), 2, "error: out of memory: MemoryError. Reduce locate.batch_size"),
        (ZeroDivisionError("a\nbug"), 1, "internal error: ZeroDivisionError: a bug. Run `surgery --debug`"),
    ):
        assert end(monkeypatch, error) == code, error
        printed = capsys.readouterr().err
        assert printed.startswith(line) and printed.count("\n") <= 1, error
    assert end(monkeypatch, ZeroDivisionError("a\nbug"), debug="1") == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "ZeroDivisionError: a\nbug" in printed


def test_two_schemas_at_once_are_refused() -> None:
    with pytest.raises(SurgeryError, match="--pretrain: and --analysis"):
        cli.schema(pretrain=True, analysis=True)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """Standard error on a full disk."""
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, stream)
    yield stream


@pytest.mark.usefixtures("full")
def test_an_invalid_recipe_is_2_where_its_error_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, INVALID) == end(monkeypatch, INVALID, debug="1") == 2
