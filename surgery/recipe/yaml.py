"""Read YAML mappings and `key.path=value` overrides, with limits on size, depth and alias expansion."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import RecipeError
from surgery.recipe.yaml_errors import fault, reading_yaml

_BYTES = 2**20  # of a file or an override
_DEPTH = 50  # of lists and mappings, and parts of a dotted key
_NODES = 20_000  # values and keys, with aliases expanded
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]|.*:")  # 0100 is 64 in YAML 1.1, and 1:30 is 90
_SURROGATES = re.compile("[\ud800-\udfff]")


class _RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader with unique keys. Refuses what YAML 1.1 reads otherwise than most users mean it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, Hashable):
                raise fault(key_node.start_mark, "a key that is a list or a section", "Use a word as the key.")
            if key in seen:
                raise fault(key_node.start_mark, f"duplicate key {key!r}", "Keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if _NOT_DECIMAL.match(node.value):
            raise _read_otherwise(node, "another number", "Write a decimal number, or text in quotes.")
        return int(super().construct_yaml_int(node))  # type: ignore[no-untyped-call]

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        if ":" in node.value:
            raise _read_otherwise(node, "another number", "Write a decimal number, or text in quotes.")
        return float(super().construct_yaml_float(node))  # type: ignore[no-untyped-call]

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        if node.value.lower() not in ("true", "false"):
            raise _read_otherwise(node, "true or false", "Write true or false, or text in quotes.")
        return node.value.lower() == "true"

    def construct_yaml_timestamp(self, node: yaml.ScalarNode) -> Any:
        raise _read_otherwise(node, "a date", "Put it in quotes.")


def _read_otherwise(node: yaml.ScalarNode, what: str, instead: str) -> Exception:
    """Error for a value that YAML 1.1 does not read as most users mean it: 0100, 1:30, `on`, 2026-11-24."""
    return fault(node.start_mark, f"{node.value[:40]}, which YAML reads as {what}", instead)


for _kind in ("int", "float", "bool", "timestamp"):
    _RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_RecipeLoader, f"construct_yaml_{_kind}"))
# YAML 1.1 reads 1e-3 as a string. Read it as a number.
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a file and apply the overrides. Values of overrides are YAML.

    Raises:
        RecipeError: the file is missing, not YAML or not a mapping, a key is duplicate, or an override does not fit.
    """
    with reading_yaml(str(path), None, "It is not valid YAML."), open(path, "rb") as file:
        data = load_yaml(file.read(_BYTES + 1).decode("utf-8"))
    if not isinstance(data, dict):
        raise RecipeError(str(path), type(data).__name__, "A recipe must be a mapping of keys to values.")
    for override in overrides:
        apply(data, override)
    return data


def apply(data: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` in plain data, in place.

    Raises:
        RecipeError: the override is malformed or its path does not exist.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError("override", repr(override), "Use key.path=value, such as train.steps=100.")
    if not text.strip():
        raise RecipeError(key, "no value", f"Write a value after =, or {key}=null for none.")
    with reading_yaml("override", repr(override)[:200], "The part after = is not valid YAML."):
        value = load_yaml(text)
    *parents, last = key.split(".")
    if len(parents) >= _DEPTH:
        raise RecipeError("override", repr(override)[:200], f"A key can have at most {_DEPTH} parts.")
    node: Any = data
    for part in parents:
        place = _place(node, part, key)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[place]
    node[_place(node, last, key)] = value


def load_yaml(text: str) -> Any:
    """Parse YAML within the limits. Raises the YAML library's errors, so call it inside `reading_yaml`."""
    if len(text.encode(errors="surrogatepass")) > _BYTES:
        raise ValueError(f"more than {_BYTES} bytes")
    data = yaml.load(text, _RecipeLoader)  # noqa: S506  (a SafeLoader)
    _num_values(data)
    return data


def _num_values(value: Any, depth: int = 0) -> int:
    """Count values and keys, with aliases expanded. Raises ValueError beyond the limits."""
    if depth > _DEPTH:
        raise ValueError(f"more than {_DEPTH} levels")
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("an integer of more than 64 bits")
    if isinstance(value, str) and _SURROGATES.search(value):
        raise ValueError("an unpaired surrogate, which is not text")
    number = 1
    for part in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        number += _num_values(part, depth + 1)
        if number > _NODES:
            raise ValueError(f"more than {_NODES} values after expanding aliases")
    return number


def _place(node: Any, part: str, key: str) -> Any:
    """Resolve one part of a dotted key to the key of a mapping or the index of a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise RecipeError("override", key, f"{part!r} is inside a scalar. Use a key that exists.")
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
        raise RecipeError("override", key, f"{part!r} is not an index of this list. Use 0 to {len(node) - 1}.")
    return int(part)
