"""Models of the GPU bench: a tiny hybrid of each family, at sizes that every kernel accepts.

causal-conv1d needs rows of `in_proj` in multiples of 8, and tensor cores need widths of 16 and more. Widths of heads,
states and chunks are those of the published models, so that the timings use the kernels that Triton compiles here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.hybrid.modeling_hybrid import KERNELS
from surgery.models.lookup import family_of, geometry_of, mixer_of, structure_of
from surgery.models.torch_scans import choose_by_device
from surgery.splice.graft import splice_model
from surgery.types import Graft, MixerSpec, Mode, Plan
from tests.support.pico import pico_family

_BAMBA = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 256}
_MAMBA1 = {"hidden_size": 256, "state_size": 16, "channels_per_head": 64, "time_step_rank": 16}
_MAMBA2 = {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "chunk_size": 256}
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": _MAMBA2,
    "mamba2attn": _MAMBA2,
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "llamba": {"d_model": 256, "ssm_cfg": {"d_state": 64, "n_v_heads": 4, "n_qk_heads": 2, "expand": 1}},
    "zamba2": {"hidden_size": 256, "n_mamba_heads": 8, "mamba_d_state": 128, "chunk_size": 256},
    "bamba": _BAMBA,
    "granite": _BAMBA,
    "nemotron_h": {"hidden_size": 256, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128,
                   "chunk_size": 256, "head_dim": 64},
}  # fmt: skip
ONE_BY_ONE = ("mamba", "falcon_mamba")  # their scan is a loop over tokens on a CPU

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def exact_fp32() -> None:
    """Disable tf32 in torch. Triton kernels may still use it."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def prompt_length(name: str, toy: bool) -> int:
    """Number of tokens of a prompt: more than a chunk, and not a multiple of it."""
    if toy:
        return 13
    return 70 if name in ONE_BY_ONE else 300


def base_of(name: str, toy: bool, dtype: str = "fp32", **more: Any) -> PreTrainedModel:
    """A base on the CPU with random weights; its weights are rounded to `dtype`, its buffers are not."""
    model = pico_family(name, **{**({} if toy else SIZES[name]), **more})
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def hybrid_of(base: PreTrainedModel, mode: Mode, inits: tuple[str, str] = ("ssm", "random")) -> PreTrainedModel:
    """Attention in the first two layers that take it: one head, and two. With `add` its output is random, not zero."""
    plan = plan_of(base, mode, inits)
    hybrid = splice_model(base, plan)
    if mode == "add":
        for graft in plan.grafts:
            weight = mixer_of(hybrid, graft.site).attention.o_proj.weight
            rng = torch.Generator().manual_seed(graft.site.layer)
            weight.data.copy_(torch.randn(weight.shape, generator=rng) * weight.shape[1] ** -0.5)
    return hybrid


def plan_of(base: PreTrainedModel, mode: Mode, inits: tuple[str, str] = ("ssm", "random")) -> Plan:
    """Describe the spliced heads of the hybrids."""
    sites = family_of(base.config).sites(base.config)
    one = Graft(sites[0], (1,), mode, inits[0], ("segment_end",))
    two = Graft(sites[1], (0, 2), mode, inits[1], ("segment_end", "segment_end"))
    return Plan("pico", geometry_of(base.config), (one, two), 0)


def timed_plan(name: str, config: PreTrainedConfig) -> Plan:
    """Describe the hybrids that are timed: a copied head in the middle layer, and one at three quarters."""
    sites = family_of(config).sites(config)
    chosen = (sites[len(sites) // 2], sites[3 * len(sites) // 4])
    grafts = tuple(Graft(site, (1,), "add", "ssm", ("segment_end",)) for site in chosen)
    return Plan(name, geometry_of(config), grafts, 0)


def ssm_specs(model: PreTrainedModel) -> tuple[MixerSpec, ...]:
    """Every SSM mixer of a model."""
    return tuple(spec for spec in family_of(model.config).mixers(model.config) if spec.is_ssm)


def prompts(model: PreTrainedModel, batch: int, length: int, seed: int = 0) -> Tensor:
    """(B,T) random tokens on the model's device."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=rng).to(model.device)


def host(x: Tensor) -> Tensor:
    """The tensor on the CPU in fp64."""
    return x.detach().double().cpu()


@contextmanager
def watch(model: PreTrainedModel) -> Iterator[dict[str, str]]:
    """Fills a dict while the model runs: function of the recurrence -> the package whose code ran.

    A fused function without a kernel returns None, and is not counted. Nor are this library's own scans, which take a
    function's place where no kernel runs.
    """
    ran: dict[str, str] = {}
    saved = [
        (file, name, function)
        for file in choose_by_device(model)
        for name in KERNELS
        if hasattr(function := getattr(file, name, None), "has_kernel")
    ]
    try:
        for file, name, function in saved:
            setattr(file, name, _noting(ran, function, name))
        yield ran
    finally:
        for file, name, function in saved:
            setattr(file, name, function)


def _noting(ran: dict[str, str], function: Any, name: str) -> Callable[..., Any]:
    @wraps(function)
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(tensor, *args, **kwargs)
        if result is not None:
            ran[name] = KERNELS[name][0].split(".")[0] if function.has_kernel and tensor.is_cuda else "torch"
        return result

    return noted


def in_words(ran: dict[str, str]) -> str:
    """`mamba_ssm: a, b; torch: c`."""
    packages = sorted(set(ran.values()), key=lambda p: (p == "torch", p))
    parts = [f"{p}: {', '.join(sorted(f for f in ran if ran[f] == p))}" for p in packages]
    return "; ".join(parts) or "its own torch code"


def out_columns(spec: MixerSpec, heads: tuple[int, ...]) -> list[slice]:
    """The columns of `out_proj` that belong to these heads."""
    return [structure_of(spec).weight_slices(spec, head).out for head in heads]
