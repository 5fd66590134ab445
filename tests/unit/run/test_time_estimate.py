"""The time of a dry run: from a known speed, from a few steps on this machine, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgery.commands.tables import print_plan
from surgery.recipe import Recipe, check_recipe
from surgery.run.dry_run import dry_run
from surgery.run.machine import GIB, Machine, find_machine
from tests.support.pico import pico_base, pico_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    pico_base(vocab_size=1024, layers=2).save_pretrained(folder)
    pico_tokenizer().save_pretrained(folder)
    return str(folder)


def recipe(base: str, **more: Any) -> Recipe:
    source = {"task": "kv_retrieval", "pairs": [2, 2], "rows": 1, "weights": {"answer": 1, "base_kl": 1}}
    train = {"steps": 40, "sources": [source]}
    return check_recipe({"name": "r", "base": {"model": base}, "train": train, **more})


def test_a_known_speed_divides_the_flops_and_the_plan_says_what_is_uncertain_or_does_not_fit(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dry_run(recipe(base, hardware={"tflops": 0.5}), tmp_path / "r")
    assert found["arms"] == 2 and found["time"]["measured_on"] == ""
    assert found["time"]["step"] == pytest.approx(found["flops"]["step"] / 0.5e12)
    assert found["time"]["seconds"] == pytest.approx(found["flops"]["run"] / 0.5e12)
    for load, busy in ((0.0, False), (64.0, True)):
        print_plan({**found, "time": {**found["time"], "measured_on": "cpu", "load": load}})
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert ("other programs are running" in shown) == busy
    memory, largest = found["memory"], found["largest"]
    for rows, left, hint in (
        (2, 1 - memory["activations"], "Set a smaller train.micro_batch."),
        (1, 1 - memory["activations"], "One document is too long: shorten it, or set train.gradient_checkpointing."),
        (2, memory["weights"] - memory["total"], "Nothing is left for documents. Set train.trainable to new_heads"),
    ):
        fits = {"gpu": "x", "count": 1, "memory_gib": 1, "fits": False, "left": left}
        print_plan({**found, "fits": fits, "largest": {**largest, "rows": rows}})
        assert hint in capsys.readouterr().out


def test_small_steps_are_timed(base: str, tmp_path: Path) -> None:
    """With several stages, each has its own time. Nothing is written."""
    stage = {"sources": recipe(base).model_dump(mode="json")["train"]["sources"]}
    text = {"base_text": 4, "max_tokens": 16, "rows": 1, "weights": {"base_kl": 1.0}}  # nothing has written it
    stages = [{**stage, "name": "a", "steps": 30}, {"name": "b", "steps": 50, "sources": [*stage["sources"], text]}]
    time = dry_run(recipe(base, train={"stages": stages}), tmp_path / "r")["time"]
    assert time["measured_on"] == "cpu" and 0 < time["step"] < 30
    assert time["step"] * 30 * 2 <= time["seconds"] <= time["step"] * 80 * 2 + 1e-9
    assert list(tmp_path.iterdir()) == []


def test_large_steps_and_other_machines_are_not_timed(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surgery.run.dry_run._timed", lambda *_: pytest.fail("it ran"))
    assert dry_run(recipe(base, hardware={"count": 8}), tmp_path / "r")["time"] is None
    monkeypatch.setattr("surgery.run.dry_run._MOST_FLOPS", {"cpu": 1.0})
    assert dry_run(recipe(base), tmp_path / "r")["time"] is None


def test_the_machine_has_memory_which_is_rounded_down() -> None:
    machine = find_machine()
    assert machine.memory > 2**20 and machine.memory_gib > 0 and machine.name and machine.count >= 1
    assert Machine("", GIB * 299 // 100, 1, False).memory_gib == 2.9
    assert Machine("", 1, 1, False).memory_gib == 0.1
