"""Objectives from outside the package: what their code returns or raises is refused with their name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgery.data.encoding import encode
from surgery.errors import SurgeryError
from surgery.recipe import Source
from surgery.recipe.objectives import OBJECTIVES
from surgery.train.objectives import Objective, register_objective
from surgery.train.targets import Targets
from tests.support.pico import pico_base, pico_tokenizer
from tests.support.samples import sample


class Planted(Objective):
    """Returns what a test sets."""

    result: Any = None

    def count(self, batch: Any) -> int:
        """One term."""
        return 1

    def loss(self, inputs: Any) -> Any:
        """What the test sets, or the sum of the logits of the base, which it does not announce."""
        return self.result if self.result is not None else inputs.base.logits.sum()


def losses(result: Any) -> dict[str, torch.Tensor]:
    Planted.result = result
    source = Source.model_validate({"task": "kv_retrieval", "rows": 2, "weights": {"planted": 2.0}})
    batch, model = encode(sample("kv_retrieval", 2), pico_tokenizer()), pico_base(vocab_size=1024, layers=1)
    return Targets().weighted_losses(model, {0: source}, batch, {(0, "planted"): 1.0})


def test_a_wrong_loss_is_refused_and_one_number_is_multiplied_by_the_weight() -> None:
    register_objective("planted")(Planted)
    try:
        assert float(losses(torch.tensor(3.0))["planted"]) == 6.0
        for result, says in (
            (1.0, "objective planted: its loss returned float. Return a tensor with one number"),
            (torch.ones(3, 2), r"objective planted: its loss returned shape \(3, 2\). Return a tensor with one number"),
            (None, r"AttributeError: 'NoneType' .*'sum'. It comes from the plugin: .*test_objectives.py"),
        ):
            with pytest.raises(SurgeryError, match=says):
                losses(result)
    finally:
        del OBJECTIVES._entries["planted"]
