"""Queries and keys that train alone get the gradients of their own attention, from no more layers than they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.train.own_inputs import OwnInputs, reading_parameters
from tests.support import training_worker as worker
from tests.support.pico import pico_hybrid, pico_site, tokens


def nats(model: Any, apart: OwnInputs | None) -> list[Any]:
    """-log of each layer's attention from the last token to the third."""
    model.zero_grad()
    queries = torch.full((2, 1), 20)
    if apart is None:
        rows = model(tokens(), use_cache=False, splice_queries=queries).splice_attentions
    else:
        with apart.running():
            rows = model(tokens(), use_cache=False, splice_queries=queries).splice_attentions
    losses = [-row[..., 2].log().sum() for row in rows]
    torch.stack(losses).sum().backward()
    return losses


def test_a_head_gets_the_gradient_of_its_own_attention() -> None:
    """As in the whole model where one head is spliced. Of two, the lower one gets nothing from the upper one."""
    found = []
    for splice in ([pico_site(0)], [pico_site(0), pico_site(1)]):
        model = pico_hybrid(splice, layers=4).train()
        model.requires_grad_(False)
        for parameter in reading_parameters(model):
            parameter.requires_grad_(True)
        apart, calls = OwnInputs(model), list[int]()
        for number, block in enumerate(model.backbone.layers):
            block.mixer.register_forward_hook(lambda *_, n=number, c=calls: c.append(n))
        whole = nats(model, None)
        expected = [p.grad.clone() for p in model.backbone.layers[0].mixer.attention.parameters() if p.requires_grad]
        for first in (True, False):
            calls.clear()
            torch.testing.assert_close(nats(model, apart), whole)
            assert calls == list(range(4 if first else len(splice)))
            own = [p.grad for p in model.backbone.layers[0].mixer.attention.parameters() if p.requires_grad]
            assert all(grad.abs().max() > 0 for grad in own)
            found.append(all(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, expected, strict=True)))
        calls.clear()
        nats(model, None)
        assert calls == [0, 1, 2, 3], "other passes run all layers"
    assert found == [True, True, False, False]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_stage_trains_queries_and_keys_alone(checkpointing: bool, tmp_path: Path) -> None:
    made = worker.stage_run(tmp_path, worker.section(tmp_path, 3, gradient_checkpointing=checkpointing, **worker.READS))
    reading = {name for name, p in made.model.named_parameters() if any(p is q for q in reading_parameters(made.model))}
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    history = made.run()
    assert {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])} == reading
    assert reading and not any("o_proj" in name or "gate_proj" in name for name in reading)
    assert history[-1]["attention"] < history[0]["attention"]
