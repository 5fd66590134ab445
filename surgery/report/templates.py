"""Render the jinja2 templates of model cards, reports and sweeps."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from surgery.files.atomic import write_text


def render(package: str, name: str, values: Mapping[str, Any]) -> str:
    """Render a template of the folder `templates` of a package, such as `surgery.report`.

    Values are escaped in `*.html.j2` only. An undefined name is an error.
    """
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(values)


def write_html(path: Path, name: str, values: Mapping[str, Any], style: str = "run_page.css") -> Path:
    """Render a template of this package with the style in a file of it, and write it to `path`."""
    write_text(path, render("surgery.report", name, {**values, "style": asset(style)}))
    return path


def asset(file: str) -> str:
    """Text of a file of this package."""
    return files("surgery.report").joinpath(file).read_text(encoding="utf-8")


def embedded_svg(path: Path, alt: str) -> dict[str, str] | None:
    """An SVG file for a template; None if it does not exist."""
    if not path.is_file():
        return None
    return {"alt": alt, "data": base64.b64encode(path.read_bytes()).decode()}
