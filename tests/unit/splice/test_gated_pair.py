"""A pair with `output: copy`: what its heads put out where their gate is open, and nothing elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.errors import PlanError
from surgery.models.inserted import InsertedForCausalLM, inserted_entries, own_channels
from surgery.recipe import Splice, Train
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.splice.plan import make_plan
from surgery.train.training import train_model
from surgery.types import Plan
from tests.support.cases import each
from tests.support.pico import pico_base, pico_tokenizer
from tests.unit.splice.test_plan import chosen

SECTION = Splice(form="pair", init="ssm", output="copy", head_dim=16, side_channels=32)


def base(**config: Any) -> Any:
    return pico_base(vocab_size=1024, **config).requires_grad_(False)


def planned(model: Any, section: Splice = SECTION) -> Plan:
    heads = chosen("L1H2", "L2H0", "L2H1", reads="answer_token", config=model.config)
    return make_plan(heads, model.config, section, seed=3)


def prompts() -> list[Tensor]:
    return list(torch.randint(1024, (6, 1, 40), generator=torch.Generator().manual_seed(5)))


def spliced() -> tuple[Any, Any, Plan]:
    model = base()
    plan = planned(model)
    return model, splice_model(model, plan, SECTION, prompts=prompts()), plan


def read(hybrid: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each pair: what its block reads, its values and the mark, at each token."""
    found = []
    for entry in inserted_entries(hybrid.config):
        projection = hybrid.model.layers[entry["layers"][-1]].mixer.v_proj
        seen: list[Tensor] = []
        hook = projection.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][0]))
        with torch.no_grad():
            hybrid(ids, use_cache=False)
            hook.remove()
            found.append((seen[0], projection(seen[0]), seen[0][:, own_channels(entry).stop - 1]))
    return found


def assert_first_token_is_the_gate(hybrid: InsertedForCausalLM) -> None:
    for _, values, mark in read(hybrid, prompts()[0]):
        assert values[0].abs().max() < 1e-5 * values[1:].abs().max()
        assert mark[0] > 0.5


def test_values_are_zero_at_the_first_token_and_the_rest_is_the_base() -> None:
    model, hybrid, plan = spliced()
    assert_first_token_is_the_gate(hybrid)
    ids = torch.cat(prompts()[:2])
    gap = step_zero_gap(model, hybrid, plan, ids, torch.ones_like(ids))
    assert gap.max_logit > 0, "the output is not 0"


def test_padding_on_the_left_changes_nothing() -> None:
    """Nothing of a padded token reaches the first one, of which the convolution sees that none is before it."""
    _, hybrid, _ = spliced()
    ids = prompts()[0]
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 7).long()[None]
    with torch.no_grad():
        found = hybrid(padded, attention_mask=mask, use_cache=False).logits[:, 7:]
        expected = hybrid(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_copied_is_refused() -> None:
    model = base()
    with pytest.raises(PlanError, match="needs `prompts`"):
        splice_model(model, planned(model), SECTION)
    grouped = base(n_groups=2)
    with pytest.raises(PlanError, match=r"splice\.output: copy\. The base has 2 groups"):
        planned(grouped)
    with pytest.raises(PlanError, match=r"splice\.output: copy\. The base has no bias"):
        planned(base(use_conv_bias=False))


@each("trainable", ["reads", "all", "new_heads"])
def test_training_keeps_the_gate(trainable: str) -> None:
    model, hybrid, plan = spliced()
    weights = {"attention": 1.0} if trainable == "reads" else {"answer": 1.0}
    source = {"task": "kv_retrieval", "rows": 2, "pairs": (2, 2), "weights": weights}
    rates = {"lr": 1e-2, "new_heads_lr": 1e-2, "warmup": 0}
    recipe = {"steps": 3, "trainable": trainable, "sources": [source], "optimizer": rates}
    before = [found[0] for found in read(hybrid, prompts()[0])]
    train_model(hybrid, pico_tokenizer(), Train.model_validate(recipe), plan, model)
    assert_first_token_is_the_gate(hybrid)
    keys = [entry["channels"][0] for entry in inserted_entries(hybrid.config)]
    for key, old, (new, _, _) in zip(keys, before, read(hybrid, prompts()[0]), strict=True):
        assert trainable != "reads" or not torch.allclose(old[:, key], new[:, key]), "keys train"
