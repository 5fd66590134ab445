"""Measure the CPU seconds of each test, with those of the processes it starts.

    python -m pytest -p no:cacheprovider -p bench.cpu_time --cpu-time=cpu.json tests

Writes `{test: seconds}` and prints the slowest files and tests. A fixture counts for the test that first requests it.
CPU time depends little on what else the machine does; wall time does. With xdist, each worker reports its own tests.
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes

TICKS = os.sysconf("SC_CLK_TCK")
SHOWN = 40
COSTS = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-time", metavar="FILE", default=None, help="write the CPU seconds of each test to FILE")


def seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of the server that it started."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    if processes.stock.cache_info().currsize and processes.stock().pid:
        fields = Path(f"/proc/{processes.stock().pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    before = seconds()
    result = yield
    item.config.stash.setdefault(COSTS, {})[item.nodeid] = round(seconds() - before, 3)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass a worker's costs to the main process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cpu_time"] = session.config.stash.get(COSTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    costs = getattr(node, "workeroutput", {}).get("cpu_time", {})
    node.config.stash.setdefault(COSTS, {}).update(costs)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    costs = config.stash.get(COSTS, {})
    if path := config.getoption("--cpu-time"):
        Path(path).write_text(json.dumps(costs, indent=1) + "\n")
    files: Counter[str] = Counter()
    for test, cost in costs.items():
        files[test.split("::")[0]] += cost  # type: ignore[assignment]
    terminalreporter.section(f"CPU seconds: {sum(costs.values()):.0f}")
    for table in (files, Counter(costs)):
        for name, cost in table.most_common(SHOWN):
            terminalreporter.write_line(f"{cost:8.1f}  {name}")
