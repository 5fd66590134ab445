"""Models that the tests of all families share: a base and hybrids of each, made once.

Many tests read these models. A test that changes one must work on a copy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHPreTrainedModel

from surgery.models.lookup import family_of, geometry_of, structure_of
from surgery.models.runtime import requires_grad
from surgery.models.sizes import sizes_of
from surgery.recipe import Splice
from surgery.splice.graft import splice_model
from surgery.types import Graft, MixerSpec, Plan
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_family, randomise, tokens

every_family = pytest.mark.parametrize("name", FAMILY_NAMES)
every_spliced = pytest.mark.parametrize("name", SPLICED_FAMILIES)


@cache
def base(name: str, **more: Any) -> Any:
    """A plain pico model."""
    return pico_family(name, **more).requires_grad_(False)


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    with requires_grad(True, model):  # as loading leaves it: bits are compared
        return model(input_ids=ids, attention_mask=mask, **{"use_cache": False, **more}).logits


def stays_fp32(key: str) -> bool:
    """Whether a tensor stays fp32 in a model of half precision."""
    router = key.endswith("gate.weight") and "gate.weight" in NemotronHPreTrainedModel._keep_in_fp32_modules_strict
    return router or key.rsplit(".", 1)[-1] in ("A_log", "dt_bias", "D", "e_score_correction_bias")


def plan_of(model: Any, mode: Any = "add", init: Any = "ssm") -> Plan:
    """Two heads of the first layer that can be spliced, and one of the last."""
    first, *_, last = family_of(model.config).sites(model.config)
    two, one = (("L1H3", "L1H0"), ("L2H2",)) if init == "teacher" else ((), ())
    grafts = (
        Graft(first, (3, 1), mode, init, ("segment_end", "answer_token"), donors=two),
        Graft(last, (2,), mode, init, ("answer_token",), donors=one),
    )
    return Plan("pico", geometry_of(model.config), grafts, seed=3)


def spliced(model: Any, mode: Any = "add", init: Any = "ssm") -> Any:
    """The hybrid at step 0."""
    teacher = base("qwen2") if init == "teacher" else None
    return splice_model(model, plan_of(model, mode, init), Splice(min_width=None), teacher)


@cache
def trained(name: str, mode: Any = "add", init: Any = "ssm") -> Any:
    """A hybrid as training could leave it: nothing in it is zero or one, but for the silenced columns."""
    model = spliced(base(name), mode, init).requires_grad_(False)
    randomise(model, 7, keep=".out_proj." if mode == "replace" else None)
    model.get_input_embeddings().weight.mul_(0.1)  # or what comes next is what came last, whatever the mixers do
    return model


def mixers(model: Any, ssm: bool | None = None) -> list[MixerSpec]:
    return [s for s in family_of(model.config).mixers(model.config) if ssm is None or s.is_ssm == ssm]


def columns(spec: MixerSpec) -> list[tuple[int, slice]]:
    """Each head with its columns of `out_proj`."""
    return [(head, structure_of(spec).weight_slices(spec, head).out) for head in range(spec.num_heads)]


def shared(model: Any) -> set[frozenset[str]]:
    """Names of the weights that are one tensor."""
    groups: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(value.data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def assert_cache_is_as_large_as_said(model: Any) -> None:
    """Bytes of every tensor in the cache, at two lengths, two prompts at once."""
    size = sizes_of(model)
    for length in (5, 11):
        with torch.no_grad():
            cache = model(tokens(2, length), use_cache=True).cache
        held = 0
        for layer in cache.layers:
            for value in vars(layer).values():
                found = list(value.values()) if isinstance(value, dict) else [value]
                held += sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor) and x.ndim > 1)
        assert held == 2 * (size.state_bytes + size.kv_bytes(length))
