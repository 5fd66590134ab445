"""README, docs/ and paper/: links and anchors, names and commands that the pages list, and the site."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

import surgery as package
from surgery.cli import app
from surgery.models.registry import FAMILIES
from surgery.probes.registry import PROBES
from surgery.recipe.export import EXPORT_FORMATS
from surgery.recipe.methods import METHODS
from surgery.recipe.objectives import OBJECTIVES
from surgery.recipe.run import Recipe
from surgery.recipe.splice import _BRANCHES
from tests.integration.conftest import QUICK, RECIPE, ROOT

DOCS = ROOT / "docs"
MANUAL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "paper").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
SECTIONS = ("base", "locate", "splice", "train", "evaluate", "export", "hardware")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|^(?: {4}.*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def broken_links(page: Path, text: str) -> list[str]:
    """The links outside of code that lead to no file, or to no heading of a Markdown file."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not re.match(r"[a-z]+:", link) and (
            not target.is_file() or (anchor and anchor not in anchors(text if target == page else text_of(target)))
        ):
            broken.append(link)
    return broken


def test_links_and_anchors_resolve() -> None:
    broken = {page.relative_to(ROOT).as_posix(): broken_links(page, text_of(page)) for page in PAGES}
    assert {page: links for page, links in broken.items() if links} == {}


def test_a_broken_link_is_seen() -> None:
    text = "## One `heading`\n\n[x](LINK), `[code](no.md)`\n\n```\n[code](no.md)\n```\n"
    fine = ("use.md", "../README.md#install", "#one-heading", "https://example.org/nowhere")
    for link in (*fine, "nowhere.md", "../README.md#nowhere", "#another", "../bench"):
        assert broken_links(DOCS / "cli.md", text.replace("LINK", link)) == ([] if link in fine else [link]), link


def test_a_list_has_an_empty_line_before_it() -> None:
    """The site shows a list that directly follows a line of text as text."""
    gapless = re.compile(r"^(?![-#|>\s]|\d+\. )\S.*\n((?:- |1\. ).*)$", re.MULTILINE)
    assert gapless.findall("# T\n- a\n\ntext:\n- c\n\ntext\n\n- d\n  more\n- e\n") == ["- c"]
    assert {page.name: gapless.findall(BLOCK.sub("", text_of(page))) for page in MANUAL} == {p.name: [] for p in MANUAL}


def test_the_manual_keeps_its_size() -> None:
    words = {page.name: len(text_of(page).split()) for page in DOCS.glob("*.md")}
    assert len(text_of(ROOT / "README.md").split()) <= 1000
    assert words["findings.md"] <= 1200
    assert sum(words.values()) <= 30_000


def test_python_names_that_pages_use_exist() -> None:
    missing = []
    for page in MANUAL:
        for name in sorted(set(re.findall(r"(?<![\w./-])surgery(?:\.[A-Za-z_]\w*)+(?!\.?\w*/)", text_of(page)))):
            module, _, last = name.rpartition(".")
            found = find_spec(module) and (hasattr(import_module(module), last) or find_spec(name))
            if not found and name != "surgery.plugins":  # the group of entry points
                missing.append((page.name, name))
    assert missing == []


def test_recipe_keys_that_pages_name_exist() -> None:
    fields = Recipe.model_fields
    sections = {name: get_args(fields[name].annotation) or (fields[name].annotation,) for name in SECTIONS}
    keys = {
        name: {key for kind in kinds for key in getattr(kind, "model_fields", ())} for name, kinds in sections.items()
    }
    for page in MANUAL:
        named = re.findall(rf"[`\s']({'|'.join(SECTIONS)})\.([a-z_]+)(?=[.=:`])", text_of(page))
        named = [(section, key) for section, key in named if key not in ("json", "html", "logits")]  # files, needs
        assert {f"{section}.{key}" for section, key in named if key not in keys[section]} == set(), page.name


def test_commands_and_targets_that_pages_name_exist() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    listed = re.findall(r"^\| `surgery (\w+)", text_of(DOCS / "cli.md"), re.MULTILINE)
    assert sorted(listed) == sorted(commands)
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for page in MANUAL:
        code = "\n".join(CODE.findall(text_of(page)))
        used = set(re.findall(r"(?:^|`|\s)surgery ([a-z]+)\b", code, re.MULTILINE))
        assert used - {"import"} <= commands, (page.name, used - commands)
        made = set(re.findall(r"(?:^|`|\s)make ([a-z][\w-]*)", code, re.MULTILINE))
        assert made <= targets, (page.name, made - targets)


def test_the_api_pages_have_every_public_name() -> None:
    pages = text_of(DOCS / "api.md") + text_of(DOCS / "api-recipes.md")
    listed = re.findall(r"^::: surgery\.[\w.]+\.(\w+)$", pages, re.MULTILINE)
    assert {*package.__all__} - {"__version__"} <= set(listed)


def test_the_page_of_registries_has_every_name() -> None:
    rows = re.findall(r"^\| \[[\w ]+\]\(#[\w-]+\) \| .*$", text_of(DOCS / "api-registries.md"), re.MULTILINE)
    registries = (PROBES, OBJECTIVES, METHODS, FAMILIES, _BRANCHES, EXPORT_FORMATS)
    for row, names in zip(rows, registries, strict=True):
        assert set(re.findall(r"`(\w+)`", row.split(" | ")[2])) == set(dict(names.items()))


def test_the_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), re.DOTALL)
    assert 'load_recipe("quickstart")' in code
    code = code.replace('load_recipe("quickstart")', f"load_recipe({str(RECIPE)!r}, {list(QUICK)!r})")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "hybrid" / "model.safetensors").is_file()
