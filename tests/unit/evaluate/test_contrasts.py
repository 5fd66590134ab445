"""Arms in pairs: exact tests against counting, intervals that cover, and a gap that is not divided by noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from surgery.evaluate.contrasts import contrast, contrasts, gap_closed
from surgery.stats import mcnemar

Flags = NDArray[np.bool_]


def flags(right: int, n: int, seed: int = 0) -> Flags:
    """`right` of `n`, in any order."""
    return np.random.default_rng(seed).permutation(np.arange(n) < right)


def two(arm: Flags, than: Flags) -> dict[str, float]:
    return contrast(arm[None], than[None])[0]


def test_p_values_are_those_of_mcnemar_in_both_directions() -> None:
    for won, lost in ((0, 0), (3, 0), (2, 5), (6, 6), (1, 9)):
        arm = np.array([True] * won + [False] * lost + [True, False])
        than = np.array([False] * won + [True] * lost + [True, False])
        found, better, worse = two(arm, than), mcnemar(arm, than), mcnemar(than, arm)
        assert (found["won"], found["lost"], found["p_better"]) == (won, lost, better)
        assert found["p_two_sided"] == min(1, 2 * min(better, worse)) == two(than, arm)["p_two_sided"], (won, lost)


def test_the_interval_is_of_the_difference_in_pairs() -> None:
    arm, than = flags(80, 100), flags(60, 100, seed=1)
    found, back = two(arm, than), two(than, arm)
    assert found["difference"] == pytest.approx(0.2) and found["low"] < 0.2 < found["high"]
    assert (back["low"], back["high"]) == pytest.approx((-found["high"], -found["low"]))
    spread = math.sqrt(np.var(arm.astype(float) - than) / 100)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * spread, rel=0.15)
    same = two(arm, arm)
    assert same["low"] == same["high"] == 0 and same["p_two_sided"] == 1


def test_the_table_has_every_task_and_holm_is_over_all_of_it() -> None:
    base = {"a": flags(50, 100), "b": flags(50, 100), "c": flags(10, 20)}
    good = {"a": base["a"] | flags(90, 100, 3), "b": base["b"].copy(), "c": base["c"].copy()}
    table = contrasts({"base": base, "good": good}, [("good", "base"), ("good", "absent")])
    assert (
        list(table) == ["good"] and list(table["good"]) == ["base"] and list(table["good"]["base"]) == ["a", "b", "c"]
    )
    assert [row["significant"] for row in table["good"]["base"].values()] == [True, False, False]
    edge = {"base": {"x": np.zeros(6, bool)}, "arm": {"x": np.ones(6, bool)}}
    assert contrasts(edge, [("arm", "base")])["arm"]["base"]["x"]["significant"]
    many = {name: {**given, **{f"y{i}": np.zeros(6, bool) for i in range(2)}} for name, given in edge.items()}
    assert not contrasts(many, [("arm", "base")])["arm"]["base"]["x"]["significant"]


def test_the_gap_is_0_at_the_control_and_1_at_the_teacher() -> None:
    control = np.arange(200) < 60
    teacher = np.arange(200) < 160
    half = np.arange(200) < 110
    assert gap_closed(control, control, teacher)["value"] == 0
    assert gap_closed(teacher, control, teacher)["value"] == 1
    found = gap_closed(half, control, teacher)
    assert found["value"] == pytest.approx(0.5) and found["low"] < 0.5 < found["high"] and found["n"] == 200
    assert gap_closed(np.arange(200) < 40, control, teacher)["value"] < 0
    for ahead in (60, 63, 20):  # without a lead of the teacher there is no gap
        found = gap_closed(flags(80, 200), control, flags(ahead, 200, 5) if ahead != 60 else control)
        assert found["value"] is None and "not above the control" in found["reason"], ahead
