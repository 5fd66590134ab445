"""Which heads a search keeps measuring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surgery.locate import selection
from surgery.recipe import Locate, Splice
from surgery.recipe.locate import Search
from surgery.types import HeadId
from tests.support.training_method import NAME, training_method


class TestStillCandidates:
    """Heads of every ranking that the result depends on stay in a search."""

    def kept(self, monkeypatch: pytest.MonkeyPatch, section: Locate, select: str) -> tuple[set[str], set[float]]:
        """Columns by which heads are kept, and the risks."""
        columns: list[str] = []
        risks: list[float] = []

        def survivors(arms: Any, alive: Any, keep: int, risk: float, rounds: int) -> list[int]:
            columns.extend(str(arm[0]) for arm in arms)
            risks.append(risk)
            return list(alive)

        monkeypatch.setattr(selection, "survivors", survivors)
        table: Any = SimpleNamespace(effect=lambda column: [column])
        heads = [HeadId(0, 0)]
        left = selection.still_candidates(table, [0, 1], heads, (), section, Splice(select=select), 2)
        assert left == [0, 1], "the second item is a layer"
        return set(columns), set(risks)

    def test_of_a_plain_selection_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        section = Locate(methods=("ablation", "patching"), search=Search(first=2, risk=0.06))
        assert self.kept(monkeypatch, section, "patching") == ({"patching"}, {0.06})

    def test_of_training_the_candidates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with training_method():
            section = Locate(methods=("patching", NAME), search=Search(first=2, risk=0.06))
            columns, risks = self.kept(monkeypatch, section, "patching")
            assert columns == {"patching", "segment_end", "answer_token"} and risks == {0.03}
            assert self.kept(monkeypatch, section, NAME)[0] == {"segment_end", "answer_token"}
