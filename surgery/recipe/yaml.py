"""YAML files of one mapping, and `key.path=value` overrides, read within limits of size, depth and expansion."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import RecipeError, reading

_BYTES = 2**20  # of a file or an override
_DEPTH = 50  # of lists and mappings, and parts of a dotted key
_NODES = 20_000  # values and keys, aliases counted as what they stand for
_SURROGATES = re.compile("[\ud800-\udfff]")


class _RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader with unique keys, and with limits that hold before anything is built or expanded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}  # of finished nodes, by identity

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        mark, before = self.peek_event().start_mark, self._nodes  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > _DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"more than {_DEPTH} levels", mark)
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.MarkedYAMLError(None, None, "an alias inside what it stands for", mark)
        self._nodes += self._sizes[id(node)] if is_alias else 1
        self._sizes.setdefault(id(node), self._nodes - before)
        if isinstance(node, yaml.ScalarNode) and _SURROGATES.search(node.value):
            raise yaml.MarkedYAMLError(None, None, "half of a pair of surrogates, which is no text", mark)
        if self._nodes > _NODES:
            raise yaml.MarkedYAMLError(None, None, f"more than {_NODES} values, aliases expanded", mark)
        return node

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

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)  # type: ignore[no-untyped-call]
        if number.bit_length() > 64:
            raise yaml.constructor.ConstructorError(None, None, "a number of more than 64 bits", node.start_mark)
        return number


_RecipeLoader.add_constructor("tag:yaml.org,2002:int", _RecipeLoader.construct_yaml_int)
# YAML 1.1 reads 1e-3 as a string; people mean a number.
_RecipeLoader.add_implicit_resolver(
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
    with reading(str(path), None, "It is not valid YAML.", RecipeError), open(path, "rb") as file:
        data = load_yaml(file.read(_BYTES + 1).decode("utf-8"))
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
    with reading("override", repr(override)[:200], "The part after = is not valid YAML.", RecipeError):
        value = load_yaml(text)
    *parents, last = key.split(".")
    if len(parents) >= _DEPTH:
        raise RecipeError("override", repr(override)[:200], f"A key has at most {_DEPTH} parts.")
    node: Any = data
    for part in parents:
        place = _place(node, part, key)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[place]
    node[_place(node, last, key)] = value


def load_yaml(text: str) -> Any:
    """Plain data of a text within the limits. Raises what the library raises: call it within `reading`."""
    if len(text) > _BYTES:
        raise ValueError(f"more than {_BYTES} bytes")
    return yaml.load(text, _RecipeLoader)  # noqa: S506  (a SafeLoader)


def _place(node: Any, part: str, key: str) -> Any:
    """The key of a mapping or the index of a list that `part` of the dotted `key` means."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise RecipeError("override", key, f"{part!r} lies below a plain value.")
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
        raise RecipeError("override", key, f"{part!r} is not one of the {len(node)} entries, counted from 0.")
    return int(part)
