"""Settings by size, and batch sizes by trying."""

from __future__ import annotations

import pytest

from surgery.errors import SurgeryError
from surgery.run import settings
from surgery.run.settings import num_steps, try_batch_sizes


def test_larger_bases_get_more_steps() -> None:
    """Of those that were not measured here."""
    steps = [num_steps(10**n) for n in range(8, 12)]
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_the_batch_grows_while_that_is_faster_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a batch of n prompts moves by n / `saturates`, and a memory that grows by a unit for each prompt."""
    clock = {"now": 0.0, "peak": 0.0}
    monkeypatch.setattr(settings.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(settings, "peak_bytes", lambda: clock["peak"])

    def attempt(saturates: int, fails: int = 1000, room: int = 10**6) -> tuple[int, list[int]]:
        tried: list[int] = []
        clock["peak"] = 0.0

        def run(size: int) -> None:
            if size >= fails:
                raise MemoryError
            tried.append(size)
            clock["now"] += max(1.0, size / saturates)
            clock["peak"] = max(clock["peak"], size)

        return try_batch_sizes(run, room)[0], tried

    for saturates in (4, 8, 16, 64):
        assert attempt(saturates)[0] == saturates
    assert attempt(64, fails=16) == (8, [1, 4, 8])
    assert attempt(64, room=20) == (16, [1, 4, 8, 16])
    with pytest.raises(SurgeryError, match="Not even 4"):
        attempt(64, fails=4)

    def bug(size: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        try_batch_sizes(bug, 1)
