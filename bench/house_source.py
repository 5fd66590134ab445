"""Measure Python sources without running them: layout, import graph, functions, classes, docstrings, lines.

A unit is a package directly below `surgery`, with everything in it, or a module in its root (without `__init__` and
`__main__`). paper/HOUSE.md, explains the rows of the table made from these.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sources = Mapping[str, tuple[Path, ast.Module]]  # by module: "surgery.locate.sweep"
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_VAGUE = {"found", "given", "own", "mine", "kept", "said", "asked"}


def sources_of(package: Path) -> Sources:
    """Parse every module of a package: dotted name -> path and syntax tree."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        sources[name] = (path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
    return sources


def layout(sources: Sources) -> dict[str, int]:
    """Modules in the root, how many of them only warn at an old path, packages in the root, and all modules."""
    packages = {unit_of(name) for name, (path, _) in sources.items() if path.name == "__init__.py"} - {None}
    loose = {name for name in sources if unit_of(name) not in {None, *packages}}
    old = [name for name in loose if _is_old_path(sources[name][1])]
    return {"root modules": len(loose), "old paths": len(old), "packages": len(packages), "modules": len(sources)}


def _is_old_path(tree: ast.Module) -> bool:
    """True if a module only warns that it has moved: it has no class, and no function but `__getattr__`."""
    defined = {n.name for n in ast.walk(tree) if isinstance(n, (*_FUNCTION, ast.ClassDef))} - {"__getattr__"}
    return not defined and "deprecat" in ast.unparse(tree).lower()


def unit_of(module: str) -> str | None:
    """`surgery.locate.sweep` -> `locate`; None for the package itself and its `__main__`."""
    first = module.split(".")[1:2]
    return first[0] if first and first != ["__main__"] else None


def imports_of(module: str, path: Path, tree: ast.Module, late: bool = True) -> Iterator[str]:
    """Every dotted name that a module imports, in full: `from surgery.a import b` gives `surgery.a.b`.

    Args:
        late: include imports inside functions and under `if TYPE_CHECKING`.
    """
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                anchor = parts[: len(parts) - node.level + 1] if node.level else []
                origin = ".".join([*anchor, *filter(None, [node.module])])
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            elif late or not (isinstance(node, _FUNCTION) or _is_type_checking(node)):
                pending.append(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def graph(sources: Sources, late: bool = True) -> dict[str, Any]:
    """Arrows, cycles and floors of the import graph over units.

    Returns:
        `arrows`: pairs of different units, one importing the other. `cycles`: strongly connected components of several
        units. `mutual`: pairs that import each other. `floors`: nodes of the longest path where a cycle is one node;
        `floors of units`: the same where every unit of a cycle counts.
    """
    units = {unit for name in sources if (unit := unit_of(name)) is not None}
    below: dict[str, set[str]] = {unit: set() for unit in units}
    for name, (path, tree) in sources.items():
        unit = unit_of(name)
        for target in imports_of(name, path, tree, late) if unit else ():
            other = unit_of(target) if target.split(".")[0] == "surgery" else None
            if unit is not None and other in units and other != unit:
                below[unit].add(other)
    reach = {unit: _reachable(unit, below) for unit in units}
    component = {unit: frozenset({unit, *(v for v in reach[unit] if unit in reach[v])}) for unit in units}

    @cache
    def height(part: frozenset[str], by_unit: bool) -> int:
        others = {component[v] for unit in part for v in below[unit]} - {part}
        return (len(part) if by_unit else 1) + max((height(other, by_unit) for other in others), default=0)

    cycles = sorted(", ".join(sorted(part)) for part in set(component.values()) if len(part) > 1)
    mutual = sorted(f"{a}, {b}" for a in units for b in below[a] if a < b and a in below[b])
    return {
        "arrows": sum(map(len, below.values())),
        "cycles": len(cycles),
        "units in cycles": "; ".join(cycles) or "none",
        "mutual": len(mutual),
        "mutual pairs": "; ".join(mutual) or "none",
        "floors": max((height(part, False) for part in component.values()), default=0),
        "floors of units": max((height(part, True) for part in component.values()), default=0),
    }


def _reachable(start: str, below: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = [start]
    while pending:
        new = below[pending.pop()] - reached
        reached |= new
        pending += new
    return reached


def functions(sources: Sources) -> dict[str, Any]:
    """Count functions, methods and nested functions, their lengths, and private helpers that are called once.

    A length is the number of lines from `def` to the end, without the docstring. A private helper is called once if its
    module uses its name once outside of the definition, in a call.
    """
    every = [
        (name, node) for name, (_, tree) in sources.items() for node in ast.walk(tree) if isinstance(node, _FUNCTION)
    ]
    module, longest = max(every, key=lambda entry: length_of(entry[1]))
    once = 0
    for _, tree in sources.values():
        named = Counter(filter(None, map(_name_read, ast.walk(tree))))
        called = Counter(_name_read(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
        private = [n.name for n in ast.walk(tree) if isinstance(n, _FUNCTION) and re.match(r"_(?!_.*__$)", n.name)]
        once += sum(named[name] == called[name] == 1 for name in private)
    lengths = [length_of(node) for _, node in every]
    return {
        "number": len(every),
        "median": statistics.median(lengths),
        "p90": sorted(lengths)[-(-9 * len(lengths) // 10) - 1],
        "max": length_of(longest),
        "longest": f"{module}: {longest.name}",
        "called once": once,
        "called once, share": round(once / len(every), 3),
    }


def length_of(function: Function) -> int:
    """Lines from `def` to the last line, without the docstring."""
    assert function.end_lineno is not None
    whole = function.end_lineno - function.lineno + 1
    return whole - len(_docstring_lines(function))


def _docstring_lines(node: ast.AST) -> range:
    """The line numbers of a node's docstring."""
    if not isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Module)) or ast.get_docstring(node, clean=False) is None:
        return range(0)
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _name_read(node: ast.AST) -> str | None:
    """Return the name `f` of an expression `f` or `x.f`."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def classes(sources: Sources) -> dict[str, Any]:
    """Classes with more than 10 fields (annotated, or set on self in `__init__`) and with more than 15 methods."""
    wide: dict[str, int] = {}
    busy: dict[str, int] = {}
    for module, (_, tree) in sources.items():
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]:
            name, methods = f"{module}.{node.name}", [n for n in node.body if isinstance(n, _FUNCTION)]
            if (fields := len(fields_of(node))) > 10:
                wide[name] = fields
            if len(methods) > 15:
                busy[name] = len(methods)
    return {"more than 10 fields": len(wide), "more than 15 methods": len(busy), "fields": wide, "methods": busy}


def fields_of(node: ast.ClassDef) -> set[str]:
    """Names annotated in the class's body, but for ClassVar, and those set on self in `__init__`."""
    annotated = [n for n in node.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)]
    fields = {n.target.id for n in annotated if isinstance(n.target, ast.Name)}
    for method in [n for n in node.body if isinstance(n, _FUNCTION) and n.name == "__init__"]:
        stored = [n for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        fields |= {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return fields


def vague_assignments(sources: Sources) -> dict[str, int]:
    """Count assignments to variables with a vague name: found, given, own, mine, kept, said, asked."""
    names = [n for _, tree in sources.values() for n in ast.walk(tree) if isinstance(n, ast.Name)]
    counts = Counter(n.id for n in names if n.id in _VAGUE and isinstance(n.ctx, ast.Store))
    return {"total": counts.total(), **dict(counts.most_common())}


def docstrings(sources: Sources) -> dict[str, int]:
    """Count public functions, methods and classes, those with a docstring, and those with Args and Returns.

    Public means: defined in a module or in a public class, under a name that does not begin with an underscore. Args is
    counted for functions with a parameter other than self and cls, Returns for those that also return something.
    """
    counts: Counter[str] = Counter()
    for node in [n for _, tree in sources.values() for n in _public(tree.body)]:
        kind, text = "classes" if isinstance(node, ast.ClassDef) else "functions", ast.get_docstring(node) or ""
        counts[kind] += 1
        counts[f"{kind} with a docstring"] += bool(text)
        if isinstance(node, ast.ClassDef):
            continue
        takes = [a for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.arg not in ("self", "cls")]
        if takes:
            returns = node.returns is not None and ast.unparse(node.returns) != "None"
            counts["with parameters"] += 1
            counts["with Args"] += "Args:" in text
            counts["with a result too"] += returns
            counts["with Returns"] += returns and "Returns:" in text
    return dict(counts)


def _public(body: Iterable[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in body:
        if isinstance(node, (*_FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            yield from _public(node.body) if isinstance(node, ast.ClassDef) else ()


def lines(paths: Sequence[Path]) -> dict[str, int]:
    """Lines of Python files: code, comments and docstrings, blank. A line with code and a comment is code."""
    counts: Counter[str] = Counter(files=len(paths), code=0, text=0, blank=0)
    for path in paths:
        source = path.read_text(encoding="utf-8")
        every = source.splitlines()
        text = {line for node in ast.walk(ast.parse(source)) for line in _docstring_lines(node)}
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        text |= {t.start[0] for t in tokens if t.type == tokenize.COMMENT and every[t.start[0] - 1].strip()[0] == "#"}
        blank = {number for number, line in enumerate(every, 1) if not line.strip()} - text
        counts.update(code=len(every) - len(text) - len(blank), text=len(text), blank=len(blank))
    return dict(counts)
