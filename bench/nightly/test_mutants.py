"""The runner of `make mutants` on a planted module: which mutants are made, and what becomes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.mutants.__main__ import ROOT, measure
from bench.mutants.mutations import Mutant, mutants, sample
from bench.mutants.runner import KILLED, SURVIVED, TIMED_OUT, MeasureError, Runner
from bench.mutants.targets import TARGETS as ALL_TARGETS

LIMIT = 1.0  # seconds of processor time: an unchanged test takes milliseconds
SOURCE = '''"""A planted module."""

def total(limit: int | None) -> int:
    i = result = 0
    while i < (limit or 0):
        result = result + i
        i = i + 1
    return result
'''
TEST = """from surgery.sums import total

def test_total() -> None:
    assert total(4) == 6
"""
TARGETS = {"sums": {"surgery.sums": ("tests/test_sums.py",)}}


def planted(folder: Path, test: str = TEST) -> Path:
    for package in ("surgery", "tests"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "surgery" / "sums.py").write_text(SOURCE)
    (folder / "tests" / "test_sums.py").write_text(test)
    return folder


@pytest.mark.parametrize("module, tests", [item for modules in ALL_TARGETS.values() for item in modules.items()])
def test_every_target_exists(module: str, tests: tuple[str, ...]) -> None:
    assert importlib.util.find_spec(module) is not None
    assert [test for test in tests if not (ROOT / test).is_file()] == []


def on(operator: str, line: int) -> Mutant:
    return next(m for m in mutants("surgery.sums", SOURCE) if (m.operator, m.line) == (operator, line))


@pytest.mark.parametrize(
    "operator, line, outcome, by",
    [
        ("ReplaceBinaryOperator_Add_Sub", 6, KILLED, "tests/test_sums.py::test_total"),
        ("ReplaceBinaryOperator_Add_Sub", 7, TIMED_OUT, "SIGPROF"),  # counts down and never ends
        ("ReplaceComparisonOperator_Lt_NotEq", 5, SURVIVED, ""),
        ("ReplaceOrWithAnd", 5, KILLED, "tests/test_sums.py::test_total"),
    ],
)
def test_what_becomes_of_a_mutant(tmp_path: Path, operator: str, line: int, outcome: str, by: str) -> None:
    runner = Runner(planted(tmp_path / "tree"), limit=LIMIT)
    try:
        mutated = on(operator, line).apply(SOURCE)
        assert mutated is not None
        verdict = runner.judge("surgery.sums", mutated, ("tests/test_sums.py",))
    finally:
        runner.close()
    assert (verdict.outcome, verdict.by) == (outcome, by)
    assert (tmp_path / "tree" / "surgery" / "sums.py").read_text() == SOURCE
    assert not runner.scratch.exists()


@pytest.mark.parametrize(
    "test, message",
    [
        ("def test_nothing() -> None:\n    pass\n", "none of tests/test_sums.py imports it"),
        (TEST.replace("6", "7"), "the unchanged module fails tests/test_sums.py::test_total"),
    ],
)
def test_tests_that_cannot_judge_are_refused(tmp_path: Path, test: str, message: str) -> None:
    runner = Runner(planted(tmp_path / "tree", test), limit=LIMIT)
    try:
        with pytest.raises(MeasureError, match=message):
            measure(runner, TARGETS, 2, 0, tmp_path / "results")
    finally:
        runner.close()


def test_an_interrupted_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(planted(tmp_path / "tree"), limit=LIMIT)
    try:
        first = measure(runner, TARGETS, 3, 0, tmp_path / "results")
        judged: list[str] = []
        judge = Runner.judge
        monkeypatch.setattr(Runner, "judge", lambda *args: judged.append(args[1]) or judge(*args))
        with open(tmp_path / "results" / "results.jsonl", "a") as file:
            file.write('{"tree": "cut o')
        assert measure(runner, TARGETS, 3, 0, tmp_path / "results") == first and not judged
        more = measure(runner, TARGETS, 5, 0, tmp_path / "results")["sums"]
    finally:
        runner.close()
    assert len(judged) == 2
    assert more["killed"] + more["timed_out"] + more["survived"] == more["sampled"] == 5
    survivors = (tmp_path / "results" / "survivors.diff").read_text()
    assert survivors.count("+++ ") == more["survived"]


def lines_of(source: str) -> set[int]:
    return {mutant.line for mutant in mutants("m", source)}


def test_annotations_and_stars_have_no_mutants() -> None:
    assert lines_of(SOURCE) == {4, 5, 6, 7}
    assert lines_of("def f(a: int | None = None, *, b: 'int | None', **c: int | str) -> int | None: ...\n") == set()
    assert lines_of("x: int | None = None\n") == set()
    assert lines_of("def f(a, /, b): ...\nf(*[], **{})\n[*f, *f]\n{**f}\n") == set()
    assert lines_of("if TYPE_CHECKING:\n    x = 1\nelse:\n    x = 2\n") == {1, 4}
    assert lines_of("x = a | b\n") == {1}


def test_mutants_that_are_no_python_or_change_nothing_are_not_drawn() -> None:
    source = "x = 2 * -y\n"
    not_valid = next(m for m in mutants("m", source) if m.operator == "ReplaceUnaryOperator_USub_Not")
    assert not_valid.apply(source) is None
    drawn = sample(mutants("m", source), {"m": source}, 1000, 0)
    assert not_valid not in [mutant for mutant, _ in drawn] and len(drawn) > 10


def changes(source: str, size: int, seed: int) -> list[tuple[str, str]]:
    drawn = sample(mutants("m", source), {"m": source}, size, seed)
    return [(m.operator, source.splitlines()[m.line - 1].strip()) for m, _ in drawn]


def test_a_sample_follows_lines_that_move() -> None:
    moved = SOURCE.replace("def total", "limit = None\n\n\ndef total")
    assert changes(SOURCE, 10, 3) == changes(moved, 10, 3) == changes(SOURCE, 20, 3)[:10] != changes(SOURCE, 10, 4)
