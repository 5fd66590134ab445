"""Settings by size, and batch sizes by trying."""

from __future__ import annotations

import pytest

from surgery.errors import SurgeryError
from surgery.init import settings
from surgery.init.settings import num_steps, try_batch_sizes


def test_larger_bases_get_more_steps() -> None:
    """Of those that were not measured here."""
    steps = [num_steps(10**n) for n in range(8, 12)]
    assert steps == sorted(steps) and steps[0] < steps[-1]


class TestBatchSizes:
    """A clock that a batch of n prompts moves by `seconds[n]`, and a memory that grows by a unit for each prompt."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        clock = {"now": 0.0, "peak": 0.0}
        monkeypatch.setattr(settings.time, "perf_counter", lambda: clock["now"])
        monkeypatch.setattr(settings, "peak_bytes", lambda: clock["peak"])
        return clock

    @staticmethod
    def _try(clock: dict[str, float], saturates: int, fails: int = 1000, room: int = 10**6) -> tuple[int, list[int]]:
        tried: list[int] = []

        def run(size: int) -> None:
            if size >= fails:
                raise MemoryError
            tried.append(size)
            clock["now"] += max(1.0, size / saturates)
            clock["peak"] = max(clock["peak"], size)

        return try_batch_sizes(run, room)[0], tried

    @pytest.mark.parametrize("saturates", [4, 8, 16, 64])
    def test_the_size_grows_while_that_is_faster(self, clock: dict[str, float], saturates: int) -> None:
        assert self._try(clock, saturates)[0] == saturates

    def test_out_of_memory_ends_the_growth(self, clock: dict[str, float]) -> None:
        assert self._try(clock, 64, fails=16) == (8, [1, 4, 8])

    def test_a_batch_that_would_not_fit_is_not_tried(self, clock: dict[str, float]) -> None:
        assert self._try(clock, 64, room=20) == (16, [1, 4, 8, 16])

    def test_a_base_that_fits_no_batch_is_refused(self, clock: dict[str, float]) -> None:
        with pytest.raises(SurgeryError, match="Not even 4"):
            self._try(clock, 64, fails=4)

    def test_other_errors_pass(self) -> None:
        def run(size: int) -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            try_batch_sizes(run, 1)
