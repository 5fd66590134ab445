"""Steps that are prepared in this process. tests/integration/test_step_loader.py has those of workers."""

from __future__ import annotations

from surgery.train.step_loader import steps_of, workers_by_default


def test_steps_are_prepared_when_they_are_needed() -> None:
    prepared: list[int] = []
    steps = steps_of(lambda step: prepared.append(step) or step, range(3, 6))
    assert prepared == []
    assert next(steps) == 3 and prepared == [3]
    assert list(steps) == [4, 5]


def test_no_workers_by_default_on_a_cpu() -> None:
    assert workers_by_default("cpu") == 0
    assert 0 <= workers_by_default("cuda", 1) <= 8
    assert workers_by_default("cuda", 10**6) == 0
