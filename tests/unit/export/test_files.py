"""Files of an export that a stranger may have left otherwise than they were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import ModelError
from surgery.export.files import check_entries, check_files, fingerprints, read_object, sha256_of, visible_files

SUM = "0" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    (path / "figures").mkdir(parents=True)
    (path / "a.json").write_text("{}")
    (path / "figures" / "b.png").write_bytes(b"b")
    return path


def test_plain_files_pass_and_are_listed(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "c.json").write_text("{}")
    check_entries(folder)
    assert visible_files(folder) == [folder / "a.json", folder / "figures" / "b.png"]
    assert check_files(folder, fingerprints(folder)) == []


@pytest.mark.parametrize("place", ["", "figures", ".cache", "__pycache__", "deep/.er"])
@pytest.mark.parametrize("target", ["a.json", "figures", "nowhere", ".", "/etc/passwd"])
def test_links_are_refused_wherever_they_are(place: str, target: str, folder: Path) -> None:
    (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / place / "link").symlink_to(target if target.startswith("/") else folder / target)
    with pytest.raises(ModelError, match=r"link: a symbolic link"):
        check_entries(folder)


def test_special_files_are_refused_and_not_read(folder: Path) -> None:
    os.mkfifo(folder / "figures" / "pipe")
    with pytest.raises(ModelError, match=r"^figures/pipe: a special file"):
        check_entries(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "figures/../../secret", "", ".", "a\0b", "a\nb", "a\\b", "./a.json", "a//b"]
)
def test_a_list_names_files_of_the_folder_alone(name: str, folder: Path) -> None:
    (folder.parent / "secret").write_text("s")
    entry = {"sha256": sha256_of(folder.parent / "secret"), "size": 1}
    with pytest.raises(ModelError, match="missing") as caught:
        check_files(folder, {name: entry})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "entry",
    [None, [], "x", {}, {"size": 2}, {"sha256": SUM}]
    + [{"size": size, "sha256": SUM} for size in (-1, True, 2.0, "2", None, [])]
    + [{"size": 2, "sha256": value} for value in (5, None, "", "0" * 63, "G" * 64, SUM.encode().hex(), [SUM])],
    ids=repr,
)
def test_an_entry_of_another_type_names_the_list(entry: Any, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^export.json: files: a.json: "):
        check_files(folder, {"a.json": entry})


@pytest.mark.parametrize("listed", [None, [], "x", 5, ["a.json"]], ids=repr)
def test_a_list_of_another_type(listed: Any, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^export.json: files: "):
        check_files(folder, listed)


def test_names_that_would_break_the_line_are_quoted(folder: Path) -> None:
    (folder / "a\nb.py").write_text("")
    with pytest.raises(ModelError) as caught:
        check_files(folder, {})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["[]", "5", "null", "[" * 100_000, "{", ""])
def test_a_document_is_an_object(text: str, folder: Path) -> None:
    (folder / "a.json").write_text(text)
    with pytest.raises(ModelError, match=r"^a.json: "):
        read_object(folder, "a.json")
