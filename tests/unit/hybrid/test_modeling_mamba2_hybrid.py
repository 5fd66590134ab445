"""The whole hybrid: decoding equals the full forward however it is fed, and splicing does what it says and no more."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import each
from tests.support.llamba_loop import full
from tests.support.pico import pad, pico_hybrid, pico_site, random_site, tokens


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


class TestTraining:
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
