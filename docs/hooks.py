"""MkDocs hooks: pages from outside docs/, and links that work on GitHub and in the site.

A Markdown file of this repository links to files by their path, as GitHub reads it (`../recipes/quickstart.yaml`). In
the site such a link leads to the page that is made of the file, or to a copy of it below `files/`. The files that a
linked HTML file links to are copied too, except Markdown, which would become pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "examples/quickstart.ipynb"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    NOTEBOOK: "notebook.md",
    **{path: path for path in sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "paper").rglob("*.md"))},
}
LOCAL = re.compile(r'href="([^":#?]+)"')
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and every file that a page links to."""
    for path, page in PAGES.items():
        if path == NOTEBOOK:
            _add_notebook(files, config)
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for page in files.documentation_pages():
        for path in _targets(page.content_string, _path_of(page.src_uri)):
            for file in (path, *_linked_by_html(path)):
                if _page_of(file) not in files.src_uris and (ROOT / file).is_file():
                    files.append(File.generated(config, _page_of(file), abs_src_path=str(ROOT / file)))
    return files


def _linked_by_html(path: str) -> list[str]:
    """The files that an HTML file of the repository links to; none for other files."""
    if not path.endswith(".html") or not (ROOT / path).is_file():
        return []
    links = LOCAL.findall((ROOT / path).read_text(encoding="utf-8"))
    return [_resolve(link, path) for link in links if not link.endswith(".md")]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at pages and files of the site."""
    source = _path_of(page.file.src_uri)

    def site_link(match: re.Match[str]) -> str:
        if _is_outside(match["path"]):
            return match[0]
        target = _page_of(_resolve(match["path"], source))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".") + (match["anchor"] or "")

    return CODE.sub(_keep_outer_space, _outside_code(markdown, lambda text: LINK.sub(site_link, text)))


def _keep_outer_space(code: re.Match[str]) -> str:
    """Write a code span that begins or ends with a space as HTML: Python-Markdown strips it, GitHub does not."""
    text = code[0].strip("`")
    if code[0].startswith("```") or text.startswith(" ") == text.endswith(" "):
        return code[0]
    escaped = re.sub(r"[^A-Za-z0-9]", lambda letter: f"&#{ord(letter[0])};", text.strip(" "))
    return f"<code>{'&nbsp;' * text.startswith(' ')}{escaped}{'&nbsp;' * text.endswith(' ')}</code>"


def _add_notebook(files: Files, config: MkDocsConfig) -> None:
    """The notebook as a page, with its figures."""
    text, resources = MarkdownExporter().from_filename(str(ROOT / NOTEBOOK))
    folder = posixpath.dirname(NOTEBOOK)
    for name, image in resources["outputs"].items():
        text = text.replace(f"]({name})", f"]({posixpath.relpath(f'docs/notebook/{name}', folder)})")
        files.append(File.generated(config, f"notebook/{name}", content=image))
    files.append(File.generated(config, PAGES[NOTEBOOK], content=text, inclusion=InclusionLevel.INCLUDED))


def _targets(markdown: str, source: str) -> list[str]:
    """The paths in the repository that a page links to."""
    prose = _outside_code(markdown, lambda text: text, code="")
    return [_resolve(match["path"], source) for match in LINK.finditer(prose) if not _is_outside(match["path"])]


def _outside_code(markdown: str, change: Callable[[str], str], code: str | None = None) -> str:
    """Apply `change` to the text between code blocks and code spans, and keep these or put `code` in their place."""
    parts, end = [], 0
    for match in CODE.finditer(markdown):
        parts += [change(markdown[end : match.start()]), match[0] if code is None else code]
        end = match.end()
    return "".join([*parts, change(markdown[end:])])


def _is_outside(path: str) -> bool:
    return bool(re.match(r"[a-z]+:", path))


def _path_of(page: str) -> str:
    """The file in the repository that a page of the site is made of."""
    return next((path for path, target in PAGES.items() if target == page), f"docs/{page}")


def _page_of(path: str) -> str:
    """The place in the site of a file in the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")


def _resolve(link: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
