"""README and docs/: links, anchors, lists, the lists of names and commands, and the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import surgery as package
from surgery.models.registry import FAMILIES
from surgery.probes.registry import PROBES
from surgery.recipe.export import EXPORT_FORMATS
from surgery.recipe.methods import METHODS
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.splice import _BRANCHES
from tests.integration.conftest import ROOT, surgery

DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
)
CODE = re.compile(r"^```.*?^```$|^(?: {4}.*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    return CODE.sub("", text)


def links(text: str) -> Iterator[str]:
    """Targets of all links and images outside of code, without those to other sites."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", prose, re.M))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """The links of a page that lead to no file, or to no heading of a Markdown file."""

    def exists(link: str) -> bool:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if target == page and anchor:
            return anchor in anchors(text)
        return target.is_file() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))

    return [link for link in links(text) if not exists(link)]


def lists_without_a_gap(text: str) -> list[str]:
    """The first lines of lists that directly follow a line of text: the site shows them as text."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(?![-#|>\s]|\d+\. )\S.*\n((?:- |1\. ).*)$", prose, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors(page: str) -> None:
    assert broken_links(ROOT / page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_list_has_an_empty_line_before_it(page: str) -> None:
    assert lists_without_a_gap((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("LOG.md", False),
        ("nowhere.md", True),
        ("../README.md#install", False),
        ("../README.md#nowhere", True),
        ("#one-heading", False),
        ("#another", True),
        ("../bench", True),
        ("https://example.org/nowhere", False),
    ],
)
def test_a_broken_link_is_seen(link: str, broken: bool) -> None:
    text = f"## One `heading`\n\n[x]({link}), `[code](no.md)`\n\n```\n[code](no.md)\n```\n"
    assert broken_links(DOCS / "LOG.md", text) == ([link] if broken else [])


def test_a_list_without_a_gap_is_seen() -> None:
    assert lists_without_a_gap("# T\n- a\n- b\n\ntext:\n- c\n\ntext\n\n- d\n  more\n- e\n") == ["- c"]


def test_no_two_pages_differ_by_case_alone() -> None:
    names = [path.relative_to(DOCS).as_posix().lower() for path in DOCS.rglob("*.md")]
    assert len(names) == len(set(names))


def test_the_api_pages_have_every_public_name() -> None:
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("api.md", "api-recipes.md"))
    listed = re.findall(r"^::: surgery\.[\w.]+\.(\w+)$", pages, re.MULTILINE)
    assert {*package.__all__} - {"__version__"} <= set(listed)


def test_the_page_of_registries_has_every_name() -> None:
    rows = re.findall(
        r"^\| \[[\w ]+\]\(#[\w-]+\) \| .*$", (DOCS / "api-registries.md").read_text("utf-8"), re.MULTILINE
    )
    registries = (PROBES, OBJECTIVES, METHODS, FAMILIES, _BRANCHES, EXPORT_FORMATS)
    assert len(rows) == len(registries)
    for row, names in zip(rows, registries, strict=True):
        assert set(re.findall(r"`(\w+)`", row.split(" | ")[2])) == set(dict(names.items()))


def test_the_page_of_commands_has_every_command(tmp_path: Path) -> None:
    commands = surgery("--help", cwd=tmp_path).stdout.split("Commands:")[1]
    listed = re.findall(r"^\| `surgery (\w+)", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(re.findall(r"^  (\w+)", commands, re.MULTILINE))


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'ssm-surgery[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    linked = ("images/pipeline.svg", "files/recipes/finetune.yaml", "files/checkpoints/quickstart/export/plan.json")
    for name in ("index.html", "notebook.html", "EXTENDING.html", *linked):
        assert (tmp_path / "site" / name).is_file(), name
    assert "<code>&nbsp;sailor</code>" in (tmp_path / "site" / "EVALUATE.html").read_text(), "the space belongs to it"
    assert "surgery.locate.locating.locate_heads" in (tmp_path / "site" / "api.html").read_text()
