"""The fuzzing harness: a few of its cases on the library, and that it sees every kind of fault when one is planted."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fuzz import runner
from bench.fuzz.cases import NAMES, Case, build, target_of
from bench.fuzz.corpus import Corpus
from bench.fuzz.mutate import Mutator
from bench.fuzz.values import ROOT, STRATEGIES, Values

VALUES = Values((None, [1], {"a": 2}, "x"), ("", "..", "\ud800"), (0, -1, 1e308))


def test_six_cases(tmp_path: Path) -> None:
    """Those that need no model of their own; `make fuzz` has the others."""
    command = [
        sys.executable,
        "-m",
        "bench.fuzz",
        "--seed",
        "1",
        "--cases",
        "6",
        "--only",
        "recipes,overrides,exports",
        "--limit",
        "120",  # on a busy machine
    ]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "fuzz.json").read_text())
    assert summary["cases"] == 6 and set(summary["table"]) <= {"recipes", "overrides", "exports"}
    assert sum(counts.get("refused", 0) for counts in summary["table"].values()) > 2


def refuse() -> None:
    print("error: train.steps: many. Give a number.", file=sys.stderr)
    sys.exit(2)


def fail() -> None:
    raise KeyError("size")


def swallow() -> None:
    print("Traceback (most recent call last):\n  ...\nKeyError: 'size'", file=sys.stderr)
    sys.exit(2)


def wait() -> None:
    time.sleep(60)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_the_input() -> None:
    runpy.run_path(str(Path("evil.py").resolve()))


def run_a_shell() -> None:
    os.system("true")


def touch_the_marker() -> None:
    (Path.cwd().parent / "marker").touch()


def write_elsewhere() -> None:
    (Path.cwd().parents[1] / "elsewhere").write_text("x")


def remove_elsewhere() -> None:
    os.rename(Path.cwd(), Path.cwd().parents[1] / "moved")


def change_the_input() -> None:
    Path("evil.py").write_text("")


def remove_the_input() -> None:
    Path("evil.py").unlink()


def cut_a_file() -> None:
    Path("out").mkdir()
    Path("out/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")


def cut_json() -> None:
    Path("out").mkdir()
    Path("out/config.json").write_text('{"model_type": ')


def forget_a_shard() -> None:
    Path("out").mkdir()
    Path("out/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def leave_a_part() -> None:
    Path("out").mkdir()
    Path("out/.model.json.surgery-12.tmp").touch()
    refuse()


def write_another_name() -> None:
    Path("other").mkdir()


def say_nothing() -> None:
    sys.exit(2)


def say_too_much() -> None:
    print("error: a. b", file=sys.stderr)
    refuse()


def leave_with_one() -> None:
    sys.exit(1)


@pytest.mark.parametrize(
    ("outcome", "main"),
    [
        ("exit 0", lambda: None),
        ("refused", refuse),
        ("traceback", fail),
        ("traceback", swallow),
        ("hang", wait),
        ("crash", crash),
        ("code ran", run_the_input),
        ("code ran", run_a_shell),
        ("code ran", touch_the_marker),
        ("wrote outside", write_elsewhere),
        ("wrote outside", remove_elsewhere),
        ("input changed", change_the_input),
        ("input changed", remove_the_input),
        ("half-written", cut_a_file),
        ("half-written", cut_json),
        ("half-written", forget_a_shard),
        ("half-written", leave_a_part),
        ("half-written", write_another_name),
        ("no error line", say_nothing),
        ("several error lines", say_too_much),
        ("exit code", leave_with_one),
        ("control character", lambda: print("\x1b[2J")),
    ],
)
def test_a_planted_fault_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, main: Callable[[], None]
) -> None:
    monkeypatch.setattr(runner, "LIMIT", 0.5 if main is wait else 30.0)
    place, shared = tmp_path / "case", tmp_path / "shared"
    (place / "work").mkdir(parents=True)
    shared.mkdir()
    (place / "work" / "evil.py").write_text("x = 1\n")
    case = Case("arguments", ("convert", "m", "out"), ("out",), ())
    before = runner.snapshot(place / "work")
    ended = runner.fork(case, place, shared, main, None)
    assert runner.judge(case, place, before, ended).outcome == outcome
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "moved").exists()


def test_a_case_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    wanted = [n for n in range(60) if target_of(3, n).__name__ in ("recipes", "overrides", "exports")]
    assert {target_of(3, n).__name__ for n in range(2000)} == set(NAMES)
    place, corpus = tmp_path / "case", Corpus(tmp_path / "corpus")
    for number in wanted[:12]:
        found = []
        for _ in range(2):
            case = build(3, number, place, corpus, VALUES)
            found.append((case, runner.snapshot(place)))
            os.rename(place, tmp_path / f"{number}.{len(found)}")
        assert found[0] == found[1]


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), STRATEGIES["trees"])
def test_any_tree_can_be_mutated(rng: Random, tree: object) -> None:
    mutated = Mutator(rng, VALUES, Path("/no/marker")).tree(tree)
    assert json.dumps(mutated)
