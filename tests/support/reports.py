"""Scored heads, prompts, plans and costs that reports show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Recipe, check_recipe
from surgery.recipe.methods import all_columns
from surgery.types import Graft, HeadId, HeadSet, Interval, Plan, PromptAttention, Role, ScoredHead
from tests.support.pico import pico_config

EFFECTS = [column.name for column in all_columns().values() if column.effect]
ROLES: tuple[Role, ...] = ("neither", "gather", "aggregate", "both")


def head_set(layers: int = 2, heads: int = 3, chosen: tuple[int, ...] = (4, 1)) -> HeadSet:
    """Every head with made-up scores; `chosen` are places in layer-major order."""
    rng = np.random.default_rng(0)
    scored = []
    for i in range(layers * heads):
        scores = {c: Interval(v := float(rng.normal()), v - 0.1, v + 0.1, 50) for c in EFFECTS}
        role = ROLES[i % 4] if i < 8 else "neither"
        scored.append(ScoredHead(HeadId(i // heads, i % heads), role, "segment_end", scores))
    clean = {"accuracy": Interval(0.8, 0.7, 0.9, 50), "margin": Interval(1.5, 1.0, 2.0, 50)}
    return HeadSet("pico", "", "0", tuple(scored), tuple(scored[i] for i in chosen), "sharpen", 0, clean)


HOSTILE = ("</script>", "<script>alert(1)</script>", "<!--", "]]>", "&lt;", "\u2028", "\\u003c", "{{JS}}", '"', "\n")


def prompt(heads: HeadSet, tokens: tuple[str, ...] = HOSTILE, matrices: int = 1, seed: int = 0) -> PromptAttention:
    """Shares drawn at random, for every head; matrices of the first ones."""
    rng, T = np.random.default_rng(seed), len(tokens)
    names = [str(s.head) for s in heads.heads]
    whole = np.tril(rng.random((T, T)))
    whole /= whole.sum(1, keepdims=True)
    marks = {"segment end": 1, "answer token": 0, "query": T - 1}
    rows = {name: rng.dirichlet(np.full(T, 0.3)) for name in names}
    return PromptAttention(tokens, marks, rows, dict.fromkeys(names[:matrices], whole))


def plan(teacher: str | None = None) -> Plan:
    config = pico_config()
    graft = Graft(family_of(config).sites(config)[1], (2,), "add", "ssm", ("answer_token",))
    return Plan("quick", geometry_of(config), (graft,), 0, teacher=teacher)


def spliced(model: str, train: Mapping[str, Any] | None = None, **export: str) -> Recipe:
    source = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1}}
    section = {"steps": 7, "sources": [source], **(train or {})}
    return check_recipe({"name": "hybrid", "base": {"model": model}, "train": section, "export": export})


def cost(rows: int, tokens: int, speed: float) -> dict[str, float]:
    return {
        "rows": rows,
        "tokens": tokens,
        "prefill_tokens_per_second": speed,
        "time_to_first_token": rows * tokens / speed,
        "decode_tokens_per_second": speed / 10,
        "spread": 0.1,
        "peak_bytes": 1000 * tokens,
        "state_bytes": 512 * rows,
        "kv_bytes": 0,
    }


ARMS = {name: [cost(r, n, 100.0 + n) for r in (1, 4) for n in (32, 64)] for name in ("base", "hybrid", "mine")}
