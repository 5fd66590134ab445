"""Where a training loss is at a plateau, and how many steps its stage then has."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

import pytest

from surgery.recipe import Optimizer, Train, TrainStage
from surgery.train.plateau import LAST_STEP, find_plateau, plateau_to_json, stage_lengths

SOURCE = {"task": "kv_retrieval", "rows": 1, "weights": {"answer": 1.0, "attention": 1.0}}
ROWS = {"data": {"path": "rows.jsonl"}, "tokens": 1000, "weights": {"answer": 1.0}}
STEPS, WINDOW = 400, 25


def stage(
    steps: int = STEPS, decay: float = 0.1, schedule: str = "wsd", warmup: int = 20, **plateau: Any
) -> TrainStage:
    optimizer = {"schedule": schedule, "decay": decay, "warmup": warmup}
    return TrainStage.model_validate(
        {"steps": steps, "sources": [SOURCE], "optimizer": optimizer, "plateau": {"min_steps": 1, **plateau}}
    )


def entries(losses: list[float], name: str = "loss") -> list[dict[str, float]]:
    return [{"step": i + 1, name: loss} for i, loss in enumerate(losses)]


def found(losses: list[float], made: TrainStage | None = None) -> int | None:
    return find_plateau(entries(losses), made or stage())


def noisy(losses: list[float], seed: int, spread: float = 0.45) -> list[float]:
    """Multiply each loss by a factor of mean 1. Single steps of the quickstart have this spread."""
    rng, sigma = Random(seed), math.sqrt(math.log(1 + spread**2))
    return [loss * rng.lognormvariate(-(sigma**2) / 2, sigma) for loss in losses]


FALLING = [3.0 * 0.99**i for i in range(STEPS)]  # by a fifth in a window
FLAT_AFTER = [3.0 * 0.98 ** min(i, 150) for i in range(STEPS)]
PLATEAU = 250


def test_which_losses_are_at_a_plateau() -> None:
    """The means from step 150 on are equal, and three of them without an improvement follow the first one."""
    assert found(FLAT_AFTER) == PLATEAU == 150 + 4 * WINDOW
    assert found(FLAT_AFTER, stage(patience=5)) == 150 + 6 * WINDOW
    late = [5.0] * 150 + [5.0 * 0.97**i for i in range(100)] + [0.2] * 150
    assert found(late) == 250 + 4 * WINDOW, "a head that finds its place after 150 steps at chance"
    slow = [2.0 * 0.97 ** (i // WINDOW) for i in range(STEPS)]
    assert found(slow, stage(threshold=0.05)) is None and found(slow, stage(threshold=0.1)) is not None
    for losses, why in (
        (FALLING, "it falls"),
        (late[:250], "it was at chance, and fell"),
        ([0.0] * STEPS, "it never fell"),
        ([0.5 + i / 100 for i in range(STEPS)], "it rises"),
        ([0.6] * WINDOW + [1.2 * 0.99**i for i in range(STEPS - WINDOW)], "a base that starts well gets worse first"),
    ):
        assert found(losses) is None, why
    for seed in range(20):
        assert found(noisy(FALLING, seed)) is None, seed
        after = found(noisy(FLAT_AFTER, seed))
        assert after is not None and 150 < after <= STEPS - WINDOW, seed


def test_there_is_no_plateau_before_the_least_number_of_steps_nor_too_late_to_shorten_the_stage() -> None:
    for least, expected in ((1, 250), (251, 275), (275, 275), (None, 250)):  # by default half of the steps
        assert found(FLAT_AFTER, stage(min_steps=least)) == expected
        assert found(FLAT_AFTER, stage(700, min_steps=least)) == (350 if least is None else expected)
    assert found(FLAT_AFTER[:300], stage(300, decay=0.1)) == PLATEAU
    assert found(FLAT_AFTER[:300], stage(300, decay=0.2)) is None


def test_one_objective_can_be_monitored() -> None:
    history = [{**a, "answer": b} for a, b in zip(entries(FALLING), FLAT_AFTER, strict=True)]
    assert find_plateau(history, stage(monitor="loss")) is None
    assert find_plateau(history, stage(monitor="answer")) == PLATEAU
    assert find_plateau(entries(FALLING), stage(monitor="attention")) is None, "a model without spliced heads"


def test_lengths_of_stages_follow_from_the_history() -> None:
    of_each = [(stage(steps, window=5).model_dump(), name) for steps, name in ((50, "a"), (40, "b"), (30, "c"))]
    section = Train.model_validate({"stages": [{**made, "name": name} for made, name in of_each]})
    assert stage_lengths([], section) == [50, 40, 30]
    history: list[dict[str, float]] = [{"step": step} for step in range(1, 101)]
    history[59] = {"step": 60, LAST_STEP: 70}
    assert stage_lengths(history, section) == [50, 20, 30]
    history[39] = {"step": 40, LAST_STEP: 44}
    assert stage_lengths(history, section) == [44, 26, 30]
    described = {"a": {"steps": 44, "plateau": 40}, "b": {"steps": 26, "plateau": 60}, "c": {"steps": 30}}
    assert plateau_to_json(history, section) == described
    fixed = section.with_steps([44, 26, 30])
    assert fixed.num_all_steps == 100 and not fixed.has_plateau and stage_lengths(history[:30], fixed) == [44, 26, 30]


def test_a_plateau_that_could_not_end_a_stage_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": Optimizer()}, "cannot end a cosine.*Set `optimizer.schedule` to wsd or constant"),
        ({"optimizer": Optimizer(schedule="wsd", decay=1.0)}, "needs steps at a constant rate.*Set it below 1"),
        ({"sources": [{**SOURCE, "weights": {"answer": (1.0, 0.0)}}]}, "constant weights.*Set one number"),
        ({"steps": 50, "plateau": {}}, "plateau is at step 125, .* 139. Lower `window`, .* set `steps` to 140"),
        ({"plateau": {"min_steps": 500}}, "set `steps` to 557"),
        ({"steps": None, "tokens": 10**4, "sources": [ROWS], "plateau": {}}, "10 steps early.*`tokens` to 139001"),
        ({"plateau": {"monitor": "lm"}}, "`plateau.monitor` is lm.*Use one of loss, answer, attention"),
    ]
    for change, says in cases:
        with pytest.raises(ValueError, match=says):
            TrainStage.model_validate({**stage().model_dump(), **change})
    with pytest.raises(ValueError, match="has no `sources`"):  # such a stage is not asked for its steps
        Train.model_validate({"tokens": 10**6, "optimizer": {"schedule": "wsd"}, "plateau": {}})


def test_a_stage_is_refused_if_its_fastest_loss_could_not_end_it() -> None:
    """The loss falls once, in the second window. The error names the next number of steps that is accepted."""
    for window, patience, least, warmup, decay in ((1, 1, None, 20, 0.1), (7, 2, 60, 20, 0.45), (10, 3, 1, 55, 0.0)):
        settings = {"window": window, "patience": patience, "min_steps": least, "warmup": warmup}
        plateau, possible, suggested = stage(1000, decay, **settings).plateau, list[int](), dict[int, int]()
        for steps in range(1, 150, 3):
            made = stage(decay=decay, warmup=warmup).model_copy(update={"steps": steps, "plateau": plateau})
            after = found([2.0] * window + [1.0] * steps, made)
            if after is not None:
                possible.append(steps)
                assert stage(steps, decay, **settings).num_steps == steps
            else:
                with pytest.raises(ValueError, match="`plateau` cannot end") as error:
                    stage(steps, decay, **settings)
                suggested[steps] = int(re.search(r"set `steps` to (\d+)", str(error.value))[1])  # type: ignore[index]
        assert possible and suggested
        for steps, more in suggested.items():
            assert steps < more <= next((n for n in possible if n > steps), more)
