"""Which losses count as grown: those of trainings that broke, and none of those that went well."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from random import Random
from typing import Any

from surgery.recipe import TrainStage, load_recipe
from surgery.train.step_log import growing_loss

ROOT = Path(__file__).parents[3]
VOCAB = 1024
GUESS = math.log(VOCAB)
STEPS = 250


def stage(name: str = "answer", weight: Any = 1.0, **more: Any) -> TrainStage:
    source = {"task": "kv_retrieval", "rows": 1, "weights": {name: weight}}
    return TrainStage.model_validate({"steps": STEPS, "sources": [source], **more})


def stops_at(losses: list[float], name: str = "answer", weight: float = 1.0, **more: Any) -> int | None:
    """The first step, from 1, at which a training with these losses counts as grown."""
    history = [{"step": i + 1.0, "loss": weight * x, name: weight * x} for i, x in enumerate(losses)]
    made = stage(name, weight, **more)
    found = (step for step in range(1, len(history) + 1) if growing_loss(history[:step], made, VOCAB))
    return next(found, None)


def test_the_quickstart_s_own_curves_are_healthy() -> None:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml").train
    for curve in ("training", "no_splice_training"):
        path = ROOT / "checkpoints" / "quickstart" / "figures" / curve / f"{curve}.csv"
        history = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(path.open(encoding="utf-8"))]
        assert len(history) == recipe.num_steps == STEPS
        assert all(growing_loss(history[:step], recipe, VOCAB) is None for step in range(1, STEPS + 1)), curve


# In nats a token, of answers, from trainings of the shipped base with these learning rates.
BROKEN = {
    1.0: [0.376, 7.77, 10.15, 7.34, 13.47, 13.54, 9.19],
    0.3: [0.376, 2.51, 3.76, 4.79, 6.0, 4.61, 5.29, 4.66, 5.34, 5.29, 5.72, 5.69, *[5.5] * 20],
}


def test_learning_rates_that_broke_the_shipped_base_are_noticed() -> None:
    for rate, latest in ((1.0, 5), (0.3, 25)):
        assert (stops_at(BROKEN[rate]) or STEPS) <= latest, rate
    for weight in (1e-3, 30.0):
        assert stops_at(BROKEN[1.0], weight=weight) == stops_at(BROKEN[1.0])
        assert stops_at([0.1, 3.0, 0.1, 2.0], weight=weight) is None


def test_a_loss_that_explodes_within_the_first_steps_stops_at_once() -> None:
    for first in (0.0, 0.05, 5.4, GUESS):
        for name in ("answer", "lm", "base_kl"):
            assert stops_at([first, first, 512.0], name) == 3
            assert stops_at([first, 512.0], name) == 2


def test_what_is_no_growth() -> None:
    for seed in range(20):  # losses between nothing and a guess: no step of 20 has to be an easy one, one will be
        rng = Random(seed)
        assert stops_at([0.01, *(rng.choice([0.02, 0.5, 3.0, 6.0]) for _ in range(STEPS - 1))]) is None
    for first in (GUESS - 0.5, GUESS + 0.5):  # a pretraining begins at a guess
        warm_up = [first, first + 0.8, first + 1.5, first + 1.2, first + 0.5]
        assert stops_at([*warm_up, *(first * 0.99**i for i in range(STEPS - 5))], "lm") is None
    assert stops_at([0.01, 0.01, 20.0, *[0.01] * 30]) is None, "one hard document"
    assert stops_at([0.1, *([*[1.3] * 19, 0.1] * 10)]) is None, "nineteen steps far above the first"
    assert stops_at([0.0, *[3.0] * 60], "base_kl") is None, "what starts at zero moves away from it"
    for name in ("attention", "hidden_mse"):  # without a scale in nats
        assert stops_at([0.1, *[1e6] * 60], name) is None


def test_what_is_growth() -> None:
    assert stops_at([0.1, *[1.3] * 20]) == 21 and stops_at([0.1, *[1.1] * 20]) is None
    assert stops_at([0.0, *[GUESS + 1] * 3], "base_kl") == 4
    hot = [0.5, *[3 * GUESS] * 3]
    assert stops_at(hot, "base_kl") and not stops_at(hot, "base_kl", distil={"temperature": 4.0})


def test_a_weight_that_changes_leaves_the_first_case_alone() -> None:
    """Sources that take turns differ in difficulty; but nothing healthy is worse than a guess."""
    made, history = stage(weight=(1.0, 0.1)), []
    for i in range(STEPS):
        weight = 1.0 + (0.1 - 1.0) * i / (STEPS - 1)
        history.append({"step": i + 1.0, "answer": weight * min(0.01 * 1.5**i, 0.99 * GUESS)})
    assert all(growing_loss(history[:step], made, VOCAB) is None for step in range(1, STEPS + 1))
    assert growing_loss([*history[:9], {"step": 10.0, "answer": 512.0}], made, VOCAB) is not None
