"""Imports point downward: every package has a floor, and imports only packages of lower floors.

Imports inside functions and under TYPE_CHECKING count too. `hybrid/` is shipped with checkpoints, so it imports the
standard library, torch, transformers and its own siblings only. `surgery.__version__` is a constant for every floor.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import surgery

PACKAGE = Path(surgery.__file__).parent

# The packages and root modules from the lowest floor up. One may import from lower floors only, so there are no cycles.
# A new package or root module is added here, in docs/ARCHITECTURE.md, and nowhere else.
ORDER = (
    ("errors", "hybrid", "__version__"),
    ("types", "files", "registry"),
    ("stats", "probes"),
    ("recipe",),
    ("models", "report"),
    ("data",),
    ("locate", "splice", "train", "evaluate", "export"),
    ("run", "lm_eval_tasks"),
    ("commands",),
    ("cli", "__init__"),
    ("__main__",),
)
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names}
WITHOUT_TORCH = ("types", "errors", "recipe", "files")
HEAVY = {"torch", "transformers", "accelerate", "datasets", "safetensors", "peft", "tokenizers", "matplotlib"}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"), filename=module)


def top_of(module: str) -> str:
    """The part of a module's path that has a floor: `train/trainer.py` -> `train`, `cli.py` -> `cli`."""
    return module.split("/")[0].removesuffix(".py")


def own_package(module: str) -> list[str]:
    """The dotted package that `from . import` in `module` refers to."""
    return ["surgery", *module.split("/")[:-1]]


def targets_of(statement: ast.AST, package: list[str]) -> list[str]:
    """Every dotted name that a statement imports, in full: `from surgery.a import b` -> `surgery.a.b`."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        anchor = package[: len(package) - statement.level + 1] if statement.level else []
        origin = ".".join([*anchor, *([statement.module] if statement.module else [])])
        return [f"{origin}.{alias.name}" for alias in statement.names]
    return []


def too_high(module: str, source: ast.AST) -> list[str]:
    """The imports of `source` that reach another package of the same floor as `module`, or of a higher one."""
    targets = [t for node in ast.walk(source) for t in targets_of(node, own_package(module))]
    parts = {target: target.split(".") for target in targets}
    elsewhere = [t for t in targets if parts[t][0] == "surgery" and parts[t][1:2] != [top_of(module)]]
    top = FLOORS["__init__"]  # which `from surgery import run` reaches
    return [t for t in elsewhere if FLOORS.get("".join(parts[t][1:2]), top) >= FLOORS[top_of(module)]]


def test_the_design_has_the_same_floors() -> None:
    """The table in docs/ARCHITECTURE.md names every package and module on its floor."""
    text = (PACKAGE.parent / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    listed = {(name, int(floor)) for floor, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {(name, floor) for name, floor in FLOORS.items() if name not in ("__version__", "__main__")}


def test_imports_point_downward() -> None:
    assert {"types.py", "hybrid/modeling_hybrid.py", "train/trainer.py"} <= set(MODULES)
    assert {top_of(module) for module in MODULES} <= set(FLOORS), "give it a floor in this test and in the design"
    assert {module: found for module in MODULES if (found := too_high(module, tree_of(module)))} == {}


def not_shippable(tree: ast.AST) -> list[str]:
    """Imports that a checkpoint folder could not resolve: all but siblings, torch, transformers, standard library."""
    allowed = {"torch", "transformers"} | set(sys.stdlib_module_names)
    found = []
    for node in ast.walk(tree):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        if relative and node.level > 1:
            found.append(f"line {node.lineno}: from {'.' * node.level}")
        if not relative:
            found += [t for t in targets_of(node, []) if t.split(".")[0] not in allowed]
    return found


def test_shipped_modules_import_nothing_of_ours() -> None:
    assert {m: found for m in MODULES if top_of(m) == "hybrid" and (found := not_shippable(tree_of(m)))} == {}
    assert too_high("types.py", ast.parse("from surgery.recipe import Recipe")), "the guard itself sees them"
    own = "from ..heads import HeadId\nfrom surgery.hybrid.modeling_hybrid import attend\ndef f():\n    import numpy"
    assert len(not_shippable(ast.parse(own))) == 3
    assert not_shippable(ast.parse("from .attention import SplicedAttention\nimport math, torch.nn")) == []


def test_what_lm_eval_loads_needs_nothing_of_ours() -> None:
    targets = [t for node in ast.walk(tree_of("lm_eval_tasks/data.py")) for t in targets_of(node, [])]
    assert targets and {t.split(".")[0] for t in targets} <= {"datasets", *sys.stdlib_module_names}


def test_values_and_recipes_import_nothing_heavy() -> None:
    light = [module for module in MODULES if top_of(module) in WITHOUT_TORCH]
    targets = [t for m in light for node in ast.walk(tree_of(m)) for t in targets_of(node, own_package(m))]
    assert targets and [t for t in targets if t.split(".")[0] in HEAVY] == []


def prints_of(tree: ast.AST) -> list[int]:
    """Lines that call `print`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def test_only_the_command_line_prints() -> None:
    assert [m for m in MODULES if not m.startswith(("cli.py", "commands/")) and prints_of(tree_of(m))] == []
    assert prints_of(ast.parse("x = 1\nprint(x)")) == [2]
