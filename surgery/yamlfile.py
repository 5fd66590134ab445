"""YAML files of one mapping, and `key.path=value` overrides. Must never know: what the keys mean."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import RecipeError


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice is an error instead of a silent last-one-wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is a plain word", key_node.start_mark)
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}", f"duplicate key {key!r}", "Keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads 1e-3 as a string; people mean a number.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_mapping(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain data of a file with the overrides applied, whose values are YAML themselves.

    Raises:
        RecipeError: no such file, not YAML, a duplicate key, no mapping, an override that fits nowhere.
    """
    if not path.is_file():
        raise RecipeError("recipe", str(path), "There is no such file.")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506  (a SafeLoader)
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(str(path), " ".join(str(error).split()), "It is not valid YAML.") from None
    if not isinstance(data, dict):
        raise RecipeError(str(path), type(data).__name__, "A recipe is a mapping of keys to values.")
    for override in overrides:
        apply(data, override)
    return data


def apply(data: dict[str, Any], override: str) -> None:
    """Sets one `key.path=value` of plain data in place. Raises RecipeError where it fits nowhere."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError("override", repr(override), "Write key.path=value, such as train.steps=100.")
    try:
        value = yaml.load(text, _UniqueKeyLoader)  # noqa: S506
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError):
        raise RecipeError("override", repr(override), "The part after = is not valid YAML.") from None
    *parents, last = key.split(".")
    node: Any = data
    for part in parents:
        place = _place(node, part, key)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[place]
    node[_place(node, last, key)] = value


def _place(node: Any, part: str, key: str) -> Any:
    """The key of a mapping or the index of a list that `part` of the dotted `key` means."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise RecipeError("override", key, f"{part!r} lies below a plain value.")
    if not part.isdecimal() or int(part) >= len(node):
        raise RecipeError("override", key, f"{part!r} is not one of the {len(node)} entries, counted from 0.")
    return int(part)
