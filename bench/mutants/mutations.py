"""Enumerate the mutants of a module with cosmic-ray's operators, and draw a sample of them."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

# Left out because they take arguments and insert random numbers: the same seed would not give the same mutant.
# Left out because `is` and `==` give the same for short strings and small integers in CPython.
LEFT_OUT = (
    "VariableReplacer",
    "VariableInserter",
    "ReplaceComparisonOperator_Eq_Is",
    "ReplaceComparisonOperator_NotEq_IsNot",
)
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if name not in LEFT_OUT}

# Comparisons that replace `==` and `!=`, and mean nothing for names: "add" < "replace" is true by the alphabet alone.
_ORDERS = ("_Lt", "_LtE", "_Gt", "_GtE")

# parso's names of expressions with a binary operator. cosmic-ray also takes the stars of `{**a}` and `def f(*, a)`, and
# the slash of `def f(a, /)`, for binary operators.
_BINARY = {"expr", "xor_expr", "and_expr", "shift_expr", "arith_expr", "term", "power"}


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: dotted name.
        operator: name of cosmic-ray's operator.
        occurrence: which of the places in the module where the operator applies, from 0.
        line: line number of the change.
        key: hash of the operator and the text of the line. It stays the same when the line moves.
    """

    module: str
    operator: str
    occurrence: int
    line: int
    key: str

    def apply(self, source: str) -> str | None:
        """The mutated source. None if it is not valid Python, or the same program as before."""
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        try:
            changed = mutated is not None and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        except SyntaxError:
            return None
        return mutated if changed else None


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module. Annotations and blocks under `if TYPE_CHECKING` do not run, so they have none."""
    nodes = list(ast_nodes(get_ast(source)))
    lines = source.splitlines()
    skipped = list(_not_executed(ast.parse(source)))
    result = []
    for name, operator in OPERATORS.items():
        occurrence, same_line = -1, Counter[str]()
        for node in nodes:
            for index, (start, _) in enumerate(operator.mutation_positions(node)):
                occurrence += 1
                if not _is_meaningful(name, node) or any(first <= start < last for first, last in skipped):
                    continue
                text = lines[start[0] - 1].strip()
                same_line[text] += 1
                key = hashlib.sha256(f"{name}\0{text}\0{index}\0{same_line[text]}".encode()).hexdigest()[:16]
                result.append(Mutant(module, name, occurrence, start[0], key))
    return result


def sample(possible: list[Mutant], sources: dict[str, str], size: int, seed: int) -> list[tuple[Mutant, str]]:
    """`size` mutants with their mutated sources, or all if there are fewer.

    A hash of the seed and the mutant's key decides, not its place in the list. So mutants of lines that did not change
    are drawn again after a module was moved or reordered, and a larger sample contains a smaller one.

    Args:
        sources: source of each module by name.
    """
    drawn: list[tuple[Mutant, str]] = []
    for mutant in sorted(possible, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest()):
        if len(drawn) == size:
            break
        mutated = mutant.apply(sources[mutant.module])
        if mutated is not None:
            drawn.append((mutant, mutated))
    return drawn


def diff(mutant: Mutant, source: str, mutated: str, context: int = 2) -> str:
    """Unified diff of one mutant, headed by its operator."""
    lines = difflib.unified_diff(
        source.splitlines(),
        mutated.splitlines(),
        f"{mutant.module}:{mutant.line}",
        mutant.operator,
        n=context,
        lineterm="",
    )
    return "\n".join(lines) + "\n"


def _is_meaningful(operator: str, node: Any) -> bool:
    """Whether an operator of this name changes what it means to change at this node of parso's tree."""
    if operator.startswith("ReplaceBinaryOperator"):
        return node.parent.type in _BINARY
    if operator.startswith("ReplaceComparisonOperator") and operator.endswith(_ORDERS):
        return not any(child.type == "string" for child in node.children)
    return True


def _not_executed(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end, each (line, column), of annotations and of what only type checkers read."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts = [*node.body]
        for part in parts:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)
