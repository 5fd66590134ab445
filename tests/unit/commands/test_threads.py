"""The number of threads that a command computes with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from surgery.commands import threads
from surgery.commands.threads import cpu_quota, free_threads, set_up_cpu


def test_threads_are_free_cores_shared_by_ranks() -> None:
    for cores, allowed, quota, busy, ranks, expected in (
        (16, 16, None, 0.3, 1, 16),  # what a desktop does at rest
        (16, 4, None, 0.0, 1, 4),
        (16, 16, 2.5, 0.0, 1, 2),
        (16, 16, None, 11.8, 1, 4),
        (16, 4, None, 10.0, 1, 4),  # six cores are free, and it may run on four
        (16, 16, None, 0.0, 4, 4),
        (2, 2, None, 9.0, 1, 1),
        (2, 2, 0.5, 0.0, 1, 1),
        (2, 2, None, 0.0, 8, 1),
    ):
        assert free_threads(cores, allowed, quota, busy, ranks) == expected, (cores, allowed, quota, busy, ranks)


def quota_of(tmp_path: Path, own: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    return cpu_quota(tmp_path / "sys", tmp_path / "own")


def test_the_quota_is_the_smallest_of_all_control_groups(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "400000 100000"}
    assert quota_of(tmp_path / "v2", "0::/a/b\n", files) == 2.5
    assert quota_of(tmp_path / "v2", "0::/c\n", files) == 4.0
    files = {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}
    files |= {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert quota_of(tmp_path / "v1", "4:memory:/a\n3:cpu,cpuacct:/a\n0::/a\n", files) == 1.5
    assert quota_of(tmp_path / "v1", "3:cpu,cpuacct:/\n4:memory:/a\n", files) is None
    assert cpu_quota(tmp_path, tmp_path / "none") is None


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores, of which others use twelve. torch is not imported yet, and no number of threads is set."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "RANK", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, "")  # so that what the test sets is removed after it
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 75.0)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (8.0, 16.0, 16.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)


@pytest.mark.usefixtures("busy_machine")
def test_the_free_cores_are_used_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is set already stays: by the user, or by torch itself on a free machine."""
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    set_up_cpu()
    monkeypatch.delenv("MKL_NUM_THREADS")
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "cpu_percent", lambda interval: 1.0)
        set_up_cpu()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ and capsys.readouterr().err == ""
    said = "  threads  4 on 16 cores, of which others use 12.0. Set OMP_NUM_THREADS to change it.\n"
    for number, ranks, printed in (("4", {}, said), ("2", {"LOCAL_WORLD_SIZE": "4", "RANK": "1"}, "")):
        for name, value in ranks.items():  # only the first rank prints
            monkeypatch.setenv(name, value)
        os.environ.pop("OMP_NUM_THREADS", None)
        set_up_cpu()
        set_up_cpu()  # `surgery run --base` measures the base first
        assert os.environ["OMP_NUM_THREADS"] == number
        assert capsys.readouterr() == ("", printed), "standard output is the result, such as a recipe"
