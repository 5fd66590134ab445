"""The bench of transformers' common tests: what it records, compares and prints. The tests themselves need PyPI."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from bench.upstream import __main__ as upstream

OUTCOMES = {
    "Test_mamba_plain::test_a": "passed",
    "Test_mamba_plain::test_b": "passed",
    "Test_mamba_plain::test_c": "failed",
    "Test_mamba_plain::test_d": "skipped",
    "Test_mamba_plain::test_e": "passed",
    "Test_mamba_hybrid::test_a": "passed",
    "Test_mamba_hybrid::test_b": "failed",
    "Test_mamba_hybrid::test_c": "failed",
    "Test_mamba_hybrid::test_d": "failed",
    "Test_mamba_hybrid::test_e": "skipped",
}
REASONS = {"Test_mamba_hybrid::test_b": "AssertionError: 1 != 2"}


def test_whatever_passes_for_the_plain_class_and_not_for_ours_is_lost() -> None:
    """Failed, skipped and absent alike."""
    found = upstream.compared(OUTCOMES, REASONS)
    assert found["counts"]["plain"] == {"passed": 3, "failed": 1, "skipped": 1}
    assert found["counts"]["hybrid"] == {"passed": 1, "failed": 3, "skipped": 1}
    assert found["lost"] == {"test_b": "failed: AssertionError: 1 != 2", "test_e": "skipped: "}
    assert list(found["fails for both"]) == ["test_c"]
    assert list(found["fails where the plain class skips"]) == ["test_d"]
    without = {name: outcome for name, outcome in OUTCOMES.items() if name != "Test_mamba_hybrid::test_a"}
    assert upstream.compared(without, {})["lost"]["test_a"] == "absent: "


def test_a_failed_subtest_fails_its_test(tmp_path: Path) -> None:
    """And a skipped one does not skip it."""
    file = tmp_path / "cases.py"
    file.write_text(
        textwrap.dedent("""
        import unittest

        class Test_x_plain(unittest.TestCase):
            def test_passes(self):
                with self.subTest("one"):
                    self.skipTest("not here")

            def test_subtest_fails(self):
                with self.subTest("one"):
                    self.assertEqual(1, 2)

            def test_fails(self):
                raise ValueError("first line\\nsecond line")

            def test_skips(self):
                self.skipTest("no device")
        """)
    )
    recorder = upstream.Recorder()
    pytest.main([str(file), "-q", "-p", "no:cacheprovider"], plugins=[recorder])
    assert upstream.by_kind(recorder.outcomes)["plain"] == {
        "test_passes": "passed",
        "test_subtest_fails": "failed",
        "test_fails": "failed",
        "test_skips": "skipped",
    }
    assert recorder.reasons["Test_x_plain::test_fails"] == "ValueError: first line"
    assert recorder.reasons["Test_x_plain::test_subtest_fails"] == "AssertionError: 1 != 2"
    assert "no device" in recorder.reasons["Test_x_plain::test_skips"]


def test_the_page_shows_every_release_the_newest_first(tmp_path: Path) -> None:
    header = {"command": "python -m bench.upstream", "date": "2026-01-02", "torch": "2.13", "python": "3.11"}
    for version in ("5.9.1", "5.21.0"):
        result = {**header, "transformers": version, "families": {"mamba": upstream.compared(OUTCOMES, REASONS)}}
        (tmp_path / f"{version}.json").write_text(json.dumps(result))
    text = upstream.page(tmp_path)
    assert text.index("## transformers 5.21.0") < text.index("## transformers 5.9.1")
    assert text.count("| mamba | 3 | 1 | 1 | 1 | 3 | 1 | 2 |") == 2
