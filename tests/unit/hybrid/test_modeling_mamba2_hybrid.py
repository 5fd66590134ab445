"""The whole hybrid: decoding equals the full forward however it is fed, and splicing does what it says and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM
from tests.support.cases import each
from tests.support.pico import pad, pico_base, pico_hybrid, pico_site, random_site, tokens


@torch.no_grad()
def full(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return model(ids, attention_mask=mask, use_cache=False).logits


@each("implementation", ["eager", "sdpa"])
def test_left_padded_prefix_then_decode(implementation: str) -> None:
    """By hand, the mask growing with the tokens, one and then three at a time."""
    splice = [pico_site(0, [0, 3]), pico_site(1, [1, 2], "replace"), random_site(2, [3], "replace")]
    model = pico_hybrid(splice, attn_implementation=implementation)
    rows = [tokens(1, n, seed=n)[0] for n in (13, 18)]
    ids, mask = pad(rows, "left")
    output, steps = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True), []
    for start, end in ((12, 13), (13, 14), (14, 17), (17, 18)):
        cache = output.cache
        output = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        steps.append(output.logits)
    for b, row in enumerate(rows):
        found = torch.cat(steps, 1)[b]
        torch.testing.assert_close(found, full(model, row[None])[0, -6:], atol=1e-5, rtol=1e-5)


def test_plain_checkpoint_loads_with_the_branch_alone_missing(tmp_path: Path) -> None:
    base = pico_base()
    base.save_pretrained(tmp_path)
    splice = [pico_site(0, [1, 3]), random_site(2, [0])]
    written = ("model_type", "architectures", "layer_types")
    fields = {k: v for k, v in base.config.to_dict().items() if k not in written}
    hybrid, info = Mamba2HybridForCausalLM.from_pretrained(
        tmp_path, config=Mamba2HybridConfig(**fields, splice=splice), output_loading_info=True
    )
    new = {name for name, _ in hybrid.named_parameters() if ".mixer.attention." in name}
    assert len(new) == (5 + 1) + 5 and set(info["missing_keys"]) == new
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = hybrid.state_dict()
    for name, value in base.state_dict().items():
        assert torch.equal(ours[name], value), name
    assert torch.equal(full(hybrid.eval(), tokens()), full(base, tokens()))


class TestTraining:
    def test_rows_reach_the_branch_and_below(self) -> None:
        model = pico_hybrid([pico_site(1)]).train()
        rows = model(tokens(), splice_queries=torch.tensor([[20], [20]])).splice_attentions[0]
        rows[..., 3].sum().backward()
        reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        branch = "backbone.layers.1.mixer.attention."
        below = "backbone.layers.0.mixer.in_proj.weight"
        assert {branch + "qkv_proj.weight", branch + "conv1d.weight", branch + "scale", below} <= reached
        assert not any(branch + name in reached for name in ("o_proj.weight", "gate_proj.weight"))
        assert not any("layers.2" in name or "lm_head" in name for name in reached)

    @each("keywords", [{"use_reentrant": True}, None])
    def test_reentrant_checkpointing_never_loses_the_rows_silently(self, keywords: dict | None) -> None:
        """Asked for by name it is refused; what the library takes by default is refused or works."""
        model, queries = pico_hybrid([pico_site(1)]).train(), torch.tensor([[20], [20]])
        model.gradient_checkpointing_enable(keywords)
        model.enable_input_require_grads()
        try:
            rows = model(tokens(), splice_queries=queries).splice_attentions[0]
        except ValueError as error:
            assert "use_reentrant" in str(error) and "splice_queries" in str(error)
        else:
            assert keywords is None
            rows[..., 3].sum().backward()
            assert model.backbone.layers[1].mixer.attention.scale.grad.any()
        assert model.eval()(tokens(), splice_queries=queries, use_cache=False).splice_attentions is not None

    def test_rows_with_a_cache_are_refused(self) -> None:
        model, queries = pico_hybrid([pico_site(1)]), torch.tensor([[20], [20]])
        for more in ({"use_cache": True}, {"cache": model(tokens()).cache}):
            with pytest.raises(ValueError, match=r"splice_queries.*use_cache=False"):
                model(tokens(), splice_queries=queries, **more)
