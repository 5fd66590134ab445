"""Files of an export that a stranger may have left otherwise than they were written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surgery.errors import ModelError
from surgery.export.files import check_entries, check_files, fingerprints, sha256_of

SUM = "0" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    (path / "figures").mkdir(parents=True)
    (path / "a.json").write_text("{}")
    (path / "figures" / "b.png").write_bytes(b"b")
    return path


def test_links_and_special_files_are_refused_wherever_they_are(folder: Path) -> None:
    for place in ("", "figures", ".cache", "__pycache__", "deep/.er"):
        for target in (folder / "a.json", folder / "figures", folder / "nowhere", folder, Path("/etc/passwd")):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / "link").symlink_to(target)
            with pytest.raises(ModelError, match=r"link: a symbolic link"):
                check_entries(folder)
            (folder / place / "link").unlink()
    os.mkfifo(folder / "figures" / "pipe")
    with pytest.raises(ModelError, match=r"^figures/pipe: a special file"):
        check_entries(folder)


def test_a_list_names_files_of_the_folder_alone(folder: Path) -> None:
    (folder.parent / "secret").write_text("s")
    entry = {"sha256": sha256_of(folder.parent / "secret"), "size": 1}
    outside = ("../secret", "/etc/passwd", "figures/../../secret", "", ".", "a\0b", "a\nb", "a\\b", "./a.json", "a//b")
    for name in outside:
        with pytest.raises(ModelError, match="missing") as caught:
            check_files(folder, {name: entry})
        assert len(str(caught.value).splitlines()) == 1, name
    (folder / "a\nb.py").write_text("")
    with pytest.raises(ModelError) as caught:
        check_files(folder, {})
    assert len(str(caught.value).splitlines()) == 1


def test_a_list_of_another_type_is_named(folder: Path) -> None:
    sizes = [{"size": size, "sha256": SUM} for size in (-1, True, 2.0, "2", None, [])]
    sums = [{"size": 2, "sha256": value} for value in (5, None, "", "0" * 63, "G" * 64, SUM.encode().hex(), [SUM])]
    for entry in (None, [], "x", {}, {"size": 2}, {"sha256": SUM}, *sizes, *sums):
        with pytest.raises(ModelError, match=r"^export.json: files: a.json: "):
            check_files(folder, {"a.json": entry})
    for listed in (None, [], "x", 5, ["a.json"]):
        with pytest.raises(ModelError, match=r"^export.json: files: "):
            check_files(folder, listed)


def test_a_card_in_another_encoding_is_named_with_its_line(folder: Path) -> None:
    """Also one that was added after the export."""
    (folder / "README.md").write_bytes("# A\n\nDonn\u00e9es.\n".encode("latin-1"))
    for listed in (fingerprints(folder), {}):
        (folder / "a.json").unlink(missing_ok=True)
        listed.pop("a.json", None)
        with pytest.raises(
            ModelError, match=r"^README.md: not UTF-8: byte 0xe9 in line 3\. .* iconv -f latin1 -t utf-8"
        ):
            check_files(folder, listed)
