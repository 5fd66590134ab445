"""Compare attention implementations of the spliced heads with eager attention.

A hybrid of mamba2 runs with each implementation, at two pairs of widths: 128 query and 64 value channels (a copy of a
published Mamba-2 head), and 64 and 64 (for backends that need equal widths). The reference is eager in fp32 with
weights rounded to the dtype in use. The error of eager itself in that dtype is reported too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from bench.gpu.env import Row, first_line
from bench.gpu.families import BF16_LIMIT, TIMES_CPU, relative
from bench.gpu.models import base_of, exact_fp32, host, hybrid_of, prompts
from bench.gpu.runner import Options, gpu_lost, note

BACKENDS = {
    "sdpa": None,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
IMPLEMENTATIONS = (*BACKENDS, "flash_attention_2", "flex_attention")
PROMPTS = ("plain", "left-padded")
LENGTH, STEPS, PADS = 150, 4, 37
# Errors that a backend raises for a shape that it does not support.
REFUSALS = (RuntimeError, ValueError, ImportError, NotImplementedError)


def items(options: Options) -> list[str]:
    """Items `implementation | state | prompts`. A CPU has fewer, and compiling flex attention takes minutes there."""
    names = IMPLEMENTATIONS if options.device == "cuda" else ("sdpa", "sdpa flash", "sdpa math", "flash_attention_2")
    states = (8, 16) if options.toy else (128, 64)
    return [f"{name} | {state} | {kind}" for name in names for kind in PROMPTS for state in states]


def warm(options: Options) -> list[str]:
    """Those that compile: the scan at both widths, and flex attention."""
    return [item for item in items(options) if item.split(" | ")[0] in ("sdpa", "flex_attention")]


def run(item: str, options: Options) -> list[Row]:
    """Measure one row of `attention`, with the reasons for missing cells. `state` in the name is the query width."""
    exact_fp32()
    implementation, state, kind = item.split(" | ")
    hybrid = _hybrid(int(state), options)
    eager, reference = _eager(int(state), kind, options)
    row: Row = {"table": "attention", "implementation": implementation, "prompts": kind}
    row["widths"] = f"{state}/{hybrid.config.head_dim}"
    row["eager"], row["ok"] = {}, True
    refused: dict[str, list[str]] = {}
    for name, measure in MEASURES.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with _implementation(hybrid, implementation):
                    found = measure(hybrid, kind, options)
            except REFUSALS as error:
                if gpu_lost(options.device) or isinstance(error, torch.OutOfMemoryError):
                    raise
                refused.setdefault(_reason(error, said), []).append(name)
                continue
        row[name], row["eager"][name] = relative(found, reference[name]), relative(eager[name], reference[name])
        row["ok"] &= row[name] <= max(BF16_LIMIT, TIMES_CPU * row["eager"][name])
    return [*([row] if row["eager"] else []), *(_refusal(row, why, names) for why, names in refused.items())]


def _refusal(row: Row, why: str, names: list[str]) -> Row:
    what = [] if len(names) == len(MEASURES) else names
    return note(" ".join([row["implementation"], row["widths"], row["prompts"], *what]), f"not available ({why})")


def _reason(error: Exception, said: Sequence[warnings.WarningMessage]) -> str:
    """Find the reason why a backend refuses: torch prints it as a warning, and raises a general error."""
    words = [str(w.message).split(" (Triggered")[0] for w in said if "require" in str(w.message)]
    return words[0].split(". Got")[0] if words else f"{type(error).__name__}: {first_line(error)}"


@cache
def _hybrid(state: int, options: Options) -> PreTrainedModel:
    dtype = "bf16" if options.device == "cuda" else "fp32"
    base = base_of("mamba2", options.toy, dtype, state_size=state)
    return hybrid_of(base, "add", ("ssm", "ssm")).to(options.device)


@cache
def _eager(state: int, kind: str, options: Options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of eager attention in the hybrid's dtype and in fp32."""
    hybrid = _hybrid(state, options)
    kept = {name: p.dtype for name, p in hybrid.named_parameters()}
    with _implementation(hybrid, "eager"):
        own = {name: measure(hybrid, kind, options) for name, measure in MEASURES.items()}
        for p in hybrid.parameters():
            p.data = p.data.float()
        reference = {name: measure(hybrid, kind, options) for name, measure in MEASURES.items()}
    for name, p in hybrid.named_parameters():
        p.data = p.data.to(kept[name])
    return own, reference


@contextmanager
def _implementation(hybrid: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention implementation of a model. Raises ImportError or ValueError if it is not available."""
    hybrid.set_attn_implementation(name.split()[0])
    backend = BACKENDS.get(name)
    try:
        with nullcontext() if backend is None else sdpa_kernel([backend]):
            yield
    finally:
        hybrid.set_attn_implementation("eager")


def _prompts(hybrid: PreTrainedModel, kind: str, options: Options) -> tuple[Tensor, Tensor | None]:
    """(B,T) tokens, and their mask; None without padding."""
    length, pads = (17, 5) if options.toy else (LENGTH, PADS)
    ids = prompts(hybrid, 2, length)
    if kind == "plain":
        return ids, None
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    return ids, mask


@torch.no_grad()
def _forward(hybrid: PreTrainedModel, kind: str, options: Options) -> Tensor:
    """Logits of the tokens that are not padding."""
    ids, mask = _prompts(hybrid, kind, options)
    logits = hybrid.eval()(ids, attention_mask=mask, use_cache=False).logits
    return host(logits if mask is None else logits[mask.bool()])


@torch.no_grad()
def _decode(hybrid: PreTrainedModel, kind: str, options: Options) -> Tensor:
    """(B,STEPS+1,V) logits at the end of the prompt and at each decoded token."""
    ids, mask = _prompts(hybrid.eval(), kind, options)
    start, cache, steps = ids.shape[1] - STEPS, None, []
    for first, end in [(0, start), *((t, t + 1) for t in range(start, ids.shape[1]))]:
        seen = None if mask is None else mask[:, :end]
        output = hybrid(ids[:, first:end], attention_mask=seen, cache=cache, use_cache=True)
        cache = output.cache
        steps.append(output.logits[:, -1:])
    return host(torch.cat(steps, dim=1))


def _gradient(hybrid: PreTrainedModel, kind: str, options: Options) -> Tensor:
    """Gradient of all parameters as one vector, in training mode."""
    ids, mask = _prompts(hybrid.train(), kind, options)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    counts = real[:, :-1] & real[:, 1:]
    hybrid.zero_grad()
    logits = hybrid(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits[counts].float(), ids[:, 1:][counts]).backward()
    gradient = torch.cat([p.grad.flatten().double() for p in hybrid.parameters() if p.grad is not None])
    hybrid.eval().zero_grad()
    return host(gradient)


MEASURES = {"forward": _forward, "decode": _decode, "gradient": _gradient}
