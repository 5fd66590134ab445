"""Hints for errors of recipes: known keys for an unknown one, and an example where a list or a section is required."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_origin

import yaml

from surgery.recipe.section import Section, section_of

Place = Sequence[str | int]  # parts of a dotted key

# Keys that other tools have, and names that several sections have: the keys that are most likely meant.
_USUAL = {
    "batch_size": ("train.sources.0.rows", "locate.batch_size", "evaluate.batch_size"),
    "data": ("train.sources.0.data", "locate.data"),
    "gates": ("locate.method_options",),
    "heads": ("splice.num_heads", "splice.heads"),
    "learning_rate": ("train.optimizer.lr",),
    "lr": ("train.optimizer.lr",),
    "max_steps": ("train.steps",),
    "model": ("base.model",),
    "num_steps": ("train.steps",),
    "trial": ("locate.method_options",),
    "warmup_steps": ("train.optimizer.warmup",),
}
_MOST = 3  # proposals
_WIDTH = {"object": 1, "array": 2}  # of types in a JSON schema
_LONGEST = 100  # characters of a value in an example


def meant(kind: type[Section], place: Place) -> str:
    """Return a question with the known keys for an unknown one, or nothing.

    Besides keys of the same section that differ by a letter or so, a key of the same name anywhere is preferred to one
    that resembles it.

    Args:
        kind: class of the recipe.
        place: of the unknown key.
    """
    *above, last = map(str, place)
    keys = sorted(_keys(kind), key=_depth)
    section = _without_indices(".".join(above))
    siblings = {_name(key): key for key in keys if _without_indices(key).rpartition(".")[0] == section}
    close = [siblings[name] for name in get_close_matches(last, siblings, 1, cutoff=0.85)]
    close += _of_this_name(keys, section, last)
    if not close:
        close = [siblings[name] for name in get_close_matches(last, siblings, 2)]
    if not close:
        names = {_name(key): key for key in reversed(keys)}
        close = [names[name] for name in get_close_matches(last, names, 1, cutoff=0.8)]
    proposals = [_with_indices(key, above) for key in close[:_MOST]]
    return f" Did you mean {' or '.join(proposals)}?" if proposals else ""


def _of_this_name(keys: Sequence[str], section: str, last: str) -> list[str]:
    """Return the keys with the name `last`, or that are usually meant by it, in the nearest section that has one."""
    usual = [key for key in _USUAL.get(last, ()) if key in keys]
    named = [key for key in keys if _name(key) == last]
    while usual or named:
        within = f"{section}." if section else ""
        for group in (usual, named):
            inside = [key for key in group if _without_indices(key).startswith(within)]
            if inside:
                return inside if group is usual else [key for key in inside if _depth(key) == _depth(inside[0])]
        section = section.rpartition(".")[0]
    return []


def _keys(section: type[Section], above: str = "") -> Iterator[str]:
    """List all keys of a section and of those inside it. The index of an entry of a list is 0."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        inner = section_of(section, name)
        if inner is not None:
            yield from _keys(inner, f"{above}{name}.{'0.' if get_origin(field.annotation) is tuple else ''}")


def _depth(key: str) -> int:
    return key.count(".")


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _without_indices(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def _with_indices(key: str, above: Sequence[str]) -> str:
    """Give a key the indices of `above`, as far as both lie in the same sections."""
    parts = key.split(".")
    for number, (part, other) in enumerate(zip(parts, above, strict=False)):
        if part.isdecimal() and other.isdecimal():
            parts[number] = other
        elif part != other:
            break
    return ".".join(parts)


def example_at(root: Mapping[str, Any], place: Place, value: Any) -> str:
    """Return an example as `, such as [4, 8]`, or nothing if the schema has none.

    Args:
        root: JSON schema of the recipe.
        place: of a key, or an entry of a list, that requires a list or a section.
        value: its present value. A section that requires one key gets it as the value of that key.
    """
    nodes = [root]
    for part in place:  # a part that no node has is the tag of a union
        inner = [node for node in (_inside(node, part) for node in nodes) if node is not None]
        nodes = [variant for node in inner for variant in _variants(root, node)] or nodes
    node = _widest(nodes)
    if node.get("type") not in _WIDTH:
        return ""
    given = value if isinstance(value, str) and len(value) <= _LONGEST else None
    text = yaml.safe_dump(_example(root, node, given), default_flow_style=True, sort_keys=False, width=10**6)
    return f", such as {text.strip()}"


def _inside(node: Mapping[str, Any], part: str | int) -> Any:
    """Return the JSON schema of a key or of an entry of a list, or None."""
    return node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)


def _variants(root: Mapping[str, Any], node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Resolve references and unions of a JSON schema. Each variant keeps the examples and the default of the union."""
    if "$ref" in node:
        target = root["$defs"][node["$ref"].rpartition("/")[2]]
        return _variants(root, {**target, **{key: value for key, value in node.items() if key != "$ref"}})
    options = node.get("anyOf") or node.get("oneOf")
    if options is None:
        return [node]
    outer = {key: node[key] for key in ("examples", "default") if key in node}
    return [variant for option in options for variant in _variants(root, {**option, **outer})]


def _example(root: Mapping[str, Any], node: Mapping[str, Any], value: str | None = None) -> Any:
    """Return a value that a JSON schema accepts: an example or a default of it, as far as it has one."""
    if node.get("examples"):
        return node["examples"][0]
    if node.get("type") == "array":
        items = node.get("prefixItems") or [node["items"]]
        return (node.get("default") or [_example(root, _widest(_variants(root, item))) for item in items])[:2]
    if node.get("type") == "object":
        properties = node.get("properties", {})
        names = node.get("required") or [name for name in properties if name != "name"][:1]
        given = value if names == node.get("required") else None
        return {name: _example(root, _widest(_variants(root, properties[name])), given) for name in names}
    if node.get("type") == "string" and "enum" not in node and value is not None:
        return value
    scalar = "NAME" if node.get("type") == "string" else node.get("minimum") or 1
    return node.get("default") or node.get("enum", [scalar])[0]


def _widest(nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the variant that is a list, otherwise a section, otherwise the first."""
    return max(nodes, key=lambda node: _WIDTH.get(node.get("type", ""), 0))
