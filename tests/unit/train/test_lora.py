"""LoRA beside the spliced heads: where adapters sit, that they are reached, merging, and what stock PEFT loads."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from surgery.errors import RecipeError
from surgery.models.lookup import mixer_of, structure_of
from surgery.recipe import Lora
from surgery.train.lora import Adapters, adapter_parameters, refused_by_peft
from tests.support.battery import base, plan_of, spliced
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, prompts
from tests.unit.train.common import logits

BOTH = Lora(rank=2)


def stir(model: PreTrainedModel) -> None:
    """Adapters begin as zeros; a few random numbers make them count."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.copy_(torch.randn_like(parameter) * 0.3)


def hybrid() -> PreTrainedModel:
    return pico_hybrid([pico_site(1, [1])])


def test_adapters_change_nothing_at_first_and_merge_exactly() -> None:
    for model in (hybrid(), pico_base()):
        before, names = logits(model), [name for name, _ in model.named_parameters()]
        kind, adapters = model.config.model_type, Adapters(model, BOTH)
        assert torch.equal(logits(model), before)
        assert model.config.model_type == kind and "model_type" not in vars(model.config)
        stir(model)
        moved = logits(model)
        assert (moved - before).abs().max() > 1e-3
        adapters.merge({})
        torch.testing.assert_close(logits(model), moved, atol=1e-4, rtol=1e-4)
        assert [name for name, _ in model.named_parameters()] == names


def test_spliced_heads_have_no_adapter() -> None:
    model = hybrid()
    Adapters(model, Lora(rank=2, targets=("in_proj", "out_proj")))
    found = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert found and not any(".attention." in name for name in found)
    with pytest.raises(RecipeError, match=r"o_proj.*in_proj, "):
        Adapters(hybrid(), Lora(targets=("o_proj",)))


def test_a_target_that_is_tied_to_the_embeddings_is_refused() -> None:
    target = Lora(rank=2, targets=("lm_head",))
    assert Adapters(pico_base(tie_word_embeddings=False), target)
    with pytest.raises(RecipeError, match=r"lm_head.*shares its weight with the input embeddings"):
        Adapters(pico_base(tie_word_embeddings=True), target)


def test_a_fused_kernel_does_not_pass_adapters_by() -> None:
    """Mixers with an adapter behind the scan run their other path; a kernel that is used all the same is an error."""
    model, seen = hybrid(), list[bool]()
    mixer = model.backbone.layers[0].mixer
    mixer.norm.register_forward_hook(lambda *_: seen.append(mixer.training))
    adapters = Adapters(model, BOTH)
    model.train()
    model(prompts((6, 6)).input_ids % 64, use_cache=False).logits.sum().backward()
    assert seen and not any(seen) and mixer.training
    adapters.check_gradients()
    next(iter(adapter_parameters(model))).grad = None
    with pytest.raises(RecipeError, match="A kernel reads"):
        adapters.check_gradients()


@pytest.mark.parametrize("kind", ["mamba2", "mamba"])
def test_silenced_heads_stay_silent(kind: str) -> None:
    model, grafts = spliced(base(kind), "replace").double(), plan_of(base(kind), "replace").grafts
    adapters = Adapters(model, BOTH, grafts)
    stir(model)
    moved = logits(model)
    adapters.merge({})
    for graft in grafts:
        weight, slices_of = mixer_of(model, graft.site).out_proj.weight, structure_of(graft.site).weight_slices
        assert all(bool((weight[:, slices_of(graft.site, head).out] == 0).all()) for head in graft.heads)
    torch.testing.assert_close(logits(model), moved, atol=1e-5, rtol=1e-4)


def test_targets_that_peft_refuses_are_named(tmp_path: Path) -> None:
    families = [partial(pico_family, name) for name in ("falcon_mamba", "nemotron_h", "bamba")]
    for make in (hybrid, pico_base, *families):
        model, fresh, refused = make(), make(), None
        Adapters(model, BOTH).save(tmp_path, "somewhere")
        try:
            PeftModel.from_pretrained(fresh, str(tmp_path))
        except ValueError as error:
            refused = re.search(r"'(\w+)' is incompatible", str(error))
        assert refused_by_peft(model, BOTH) == ([refused[1]] if refused else []), model.config.model_type
