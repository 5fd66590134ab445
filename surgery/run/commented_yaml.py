"""Write a recipe as YAML with a comment above each value that has a reason."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Path = tuple[str | int, ...]
Comments = Mapping[Path, str]
WIDTH = 116  # of a comment


def commented_yaml(data: Mapping[str, Any], comments: Comments, head: Sequence[str] = ()) -> str:
    """Write nested plain data as YAML.

    Mappings and lists of mappings with a comment inside are written over several lines, others in one.

    Args:
        data: mappings, lists and scalars.
        comments: by the path of a value, such as `("locate", "pairs")` or `("train", "sources", 0)`.
        head: lines of comments at the top.
    """
    lines = [f"# {line}".rstrip() for line in head]
    return "\n".join([*lines, *_block(data, (), comments, "")]) + "\n"


def _block(data: Mapping[str, Any], path: Path, comments: Comments, indent: str) -> list[str]:
    lines = []
    for key, value in data.items():
        place = (*path, key)
        lines += _comment(comments.get(place, ""), indent)
        if isinstance(value, Mapping) and any(other[:-1][: len(place)] == place for other in comments):
            lines += [f"{indent}{key}:", *_block(value, place, comments, indent + "  ")]
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            lines.append(f"{indent}{key}:")
            for number, item in enumerate(value):
                lines += _comment(comments.get((*place, number), ""), indent + "  ")
                lines.append(f"{indent}  - {_flow(item)}")
        else:
            lines.append(f"{indent}{key}: {_flow(value)}")
    return lines


def _comment(text: str, indent: str) -> list[str]:
    """Wrap a comment, one `#` for each line."""
    lines = textwrap.wrap(text, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _flow(value: Any) -> str:
    """Write a value in one line of flow style."""
    plain = json.loads(json.dumps(value))  # YAML's safe writer knows no tuples
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
