"""Odd values, drawn by hypothesis from a seed: text, numbers, trees of JSON.

They are drawn in a separate process: hypothesis takes constants from all loaded local modules, so that a change to the
library would change the cases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

ROOT = Path(__file__).parents[2]
_MANY = 400
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 65536, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**7, 10**12, 10**30, 10**400,
           0.0, -0.0, 0.5, 1e-45, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))  # fmt: skip
TEXTS = (
    "", " ", ".", "..", "./", "no/such", "a/b", "org/x@", "org/x@main", "None", "null", "true", "1e5", "-1", "0x10",
    "\x00",
    "\x1b[31m", "\n", "\r\n", "\t", "\ud800", "\udcff", "\U0001f40d", "e\u0301", "\u202e", "\ufeff", "a" * 5000,
          "{}", "[]",
    "{{ 7*7 }}", "%s%n", "*", "?", "~", "$HOME", "`id`", "--help", "=", "a=b", "float8_e4m3fn", "Mamba2Config",
    "mamba2",
    "mamba", "bert", "gpt2", "zamba2_hybrid", "int4", "auto", "L0H0", "L9H9", "L-1H0",
)  # fmt: skip


@dataclass(frozen=True)
class Values:
    """What mutations draw from."""

    trees: tuple[Any, ...]
    texts: tuple[str, ...]
    numbers: tuple[float, ...]


def _texts() -> SearchStrategy[str]:
    anything = st.text(st.characters(exclude_categories=()), max_size=40)
    return st.one_of(st.sampled_from(TEXTS), anything, st.from_regex(r"[A-Za-z_./-]{1,12}", fullmatch=True))


def _numbers() -> SearchStrategy[Any]:
    return st.one_of(st.sampled_from(NUMBERS), st.integers(-5, 40), st.integers(), st.floats())


def _trees() -> SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), _numbers(), _texts())
    return st.recursive(
        leaves, lambda x: st.lists(x, max_size=4) | st.dictionaries(_texts(), x, max_size=3), max_leaves=6
    )


STRATEGIES = {"trees": _trees(), "texts": _texts(), "numbers": _numbers()}


def draw(strategy: SearchStrategy[Any], seed: int) -> list[Any]:
    """Examples of a strategy, the same for the same seed."""
    found: list[Any] = []

    @seeded(seed)
    @settings(max_examples=_MANY, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@cache
def values_of(seed: int) -> Values:
    """The values of a seed, from a clean process."""
    command = [sys.executable, "-m", __name__, str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    drawn = json.loads(done.stdout)
    return Values(tuple(drawn["trees"]), tuple(drawn["texts"]), tuple(drawn["numbers"]))


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    print(json.dumps({k: draw(strategy, int(sys.argv[1])) for k, strategy in STRATEGIES.items()}))
