"""README and docs/: links, anchors, the lists of names and commands, the programs, and the site."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import surgery as package
from tests.integration.conftest import QUICK, RECIPE, ROOT, surgery, with_path

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.compile(r"^```.*?^```$|^(?: {4}.*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[str]:
    """Targets of all links and images outside of code, without those to other sites."""
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
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


def test_links_lead_somewhere_and_lists_are_lists() -> None:
    for folder in (ROOT, DOCS, ROOT / "paper", ROOT / "recipes"):
        for page in folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"):
            text = page.read_text(encoding="utf-8")
            assert (broken_links(page, text), lists_without_a_gap(text)) == ([], []), page.relative_to(ROOT)
    for link, broken in {
        "quickstart.md": False, "nowhere.md": True, "../README.md#install": False, "../README.md#nowhere": True,
        "#one-heading": False, "#another": True, "../bench": True, "https://example.org/nowhere": False,
    }.items():  # fmt: skip
        text = f"## One `heading`\n\n[x]({link}), `[code](no.md)`\n\n```\n[code](no.md)\n```\n"
        assert broken_links(DOCS / "quickstart.md", text) == [link] * broken, link
    assert lists_without_a_gap("# T\n- a\n- b\n\ntext:\n- c\n\ntext\n\n- d\n  more\n- e\n") == ["- c"]


def test_every_public_name_and_command_is_documented(tmp_path: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("api*.md"))
    listed = re.findall(r"^::: surgery\.[\w.]+\.(\w+)$", pages, re.MULTILINE)
    assert {*package.__all__} - {"__version__"} <= set(listed)
    commands = re.findall(r"^  (\w+)", surgery("--help", cwd=tmp_path).stdout.split("Commands:")[1], re.MULTILINE)
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `surgery (\w+)", page, re.MULTILINE)) == sorted(commands)
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"^surgery (\w+)", README, re.M)) <= set(commands)
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert f"\n{target}:" in makefile, target


def test_the_python_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert 'load_recipe("quickstart")' in code
    code = code.replace('load_recipe("quickstart")', f"load_recipe({str(RECIPE)!r}, {list(QUICK)!r})")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "hybrid" / "model.safetensors").is_file()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'ssm-surgery[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**with_path(), "NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    linked = ("images/pipeline.svg", "files/recipes/finetune.yaml", "files/checkpoints/quickstart/export/plan.json")
    for name in ("index.html", "notebook.html", "EXTENDING.html", *linked):
        assert (tmp_path / "site" / name).is_file(), name
    assert "surgery.locate.locating.locate_heads" in (tmp_path / "site" / "api.html").read_text()
