"""Rival ways to choose a head or a layer, for comparison with the sweep. Owns: their scores of one batch of prompts.

Must never know: files, selection, statistics. All but `retrieval_score` are about the margin or the answer at the
query, and positive where the model loses by the removal:

- `attribution`: attribution patching (Nanda 2023; Syed, Rager, Conmy, arXiv 2310.10348), all heads in one pass;
- `integrated_gradients`: of one layer's head outputs, from 0 to their values (Sundararajan et al., arXiv 1703.01365);
- `retrieval_score`: how often a head looks at the token that is to be copied (Wu et al., arXiv 2404.15574);
- `layer_divergence`: KL of the answer's distribution without a mixer. KL-guided layer selection (arXiv 2512.20569)
  gives a student one attention layer at a time and distils it towards a teacher, to see how far the KL falls; this is
  what can be asked of a model without training.

Shape legend: B prompts, T tokens, H heads, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError, ProbeError, RecipeError
from surgery.interventions.hooks import Trace, from_mixer, hooked, record
from surgery.interventions.scaling import factored, factored_output
from surgery.locate.ablation_sweep import Sweep
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import Document
from surgery.scoring.choices import arguments
from surgery.scoring.ranking import choice_scores
from surgery.types import MixerSpec


def attribution(sweep: Sweep) -> Tensor:
    """The first-order estimate of what removing each head at every token costs.

    `sum over tokens and the head's channels of u * d margin / d u`, at the input of `out_proj`. One forward and one
    backward pass for all heads; the activations of all layers are kept meanwhile, so choose the batch by that. What
    normalises afterwards can turn its sign.

    Returns:
        (heads, B) float32 on the CPU, in logits; heads in the order of `sweep.specs`.

    Raises:
        ModelError: a fused kernel bypasses an `out_proj`.
    """
    factors = {spec.name: _level(sweep, spec, 1.0) for spec in sweep.specs}
    with torch.enable_grad(), factored(sweep.model, sweep.specs, factors):
        slopes = _slopes(sweep, list(factors.values()))
    return torch.cat([slope_BH.T for slope_BH in slopes]).float().cpu()


def integrated_gradients(sweep: Sweep, steps: int = 5, naive: bool = False) -> Tensor:
    """The margin's change along the way from a layer without its heads to the layer as it is, shared out by head.

    For one mixer after the other, the gradient by its head outputs is averaged over `steps` scales of all of them, by
    the midpoint rule. With many steps a mixer's heads sum to what removing them all costs. Each step is a forward and
    a backward pass from the mixer up.

    Args:
        naive: whole passes instead.

    Returns:
        (heads, B) float32 on the CPU, in logits; heads in the order of `sweep.specs`.

    Raises:
        RecipeError: no step.
    """
    if steps < 1:
        raise RecipeError("steps", steps, "Give 1 or more: how many scales the gradient is averaged over.")
    scales = [(step + 0.5) / steps for step in range(steps)]
    found = []
    for spec in sweep.specs:
        slopes = [_slope_at(sweep, spec, scale, naive) for scale in scales]
        found.append(torch.stack(slopes).mean(0).T)
    return torch.cat(found).float().cpu()


@torch.no_grad()
def layer_divergence(sweep: Sweep, naive: bool = False) -> Tensor:
    """How far the answer's distribution moves without a mixer: KL(clean || removed) over all V tokens at the query.

    What the mixer puts out is replaced by the bias of its `out_proj`, at every token; an MLP behind it stays. One
    forward pass from the mixer up for each.

    Args:
        naive: whole passes instead.

    Returns:
        (mixers, B) float32 on the CPU, in nats; in the order of `sweep.specs`.
    """
    clean_BV = _logits(sweep).float().log_softmax(-1)
    found = []
    for spec in sweep.specs:
        with _removed(sweep, spec, naive):
            removed_BV = _logits(sweep).float().log_softmax(-1)
        found.append((clean_BV.exp() * (clean_BV - removed_BV)).sum(-1).clamp(min=0))  # below it is rounding
    return torch.stack(found).cpu()


@torch.no_grad()
def retrieval_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    hidden: bool = False,
) -> Tensor:
    """How often each head looks at the very token that is to be copied: retrieval heads (arXiv 2404.15574).

    The share of answer tokens for which the head's largest attention weight, at the token that predicts it, is on that
    token inside the gold segment. The answers are given, not generated; answer tokens that do not stand in the segment
    are left out. One pass for each document, unpadded.

    Args:
        hidden: SSM heads too: by the size of what they mix in, `|a[t,s] x_s|` its hidden attention.
            That takes (channels,T,T) numbers a layer in Mamba-1, (H,T,T) elsewhere.

    Returns:
        (heads,) float32 on the CPU, 0 to 1, in the order of the mixers; NaN for SSM heads unless `hidden`.

    Raises:
        ModelError: no attention head, and `hidden` is not set.
        ProbeError: no answer token stands in a gold segment.
    """
    specs = family_of(model.config).mixers(model.config)
    if not hidden and all(spec.is_ssm for spec in specs):
        raise ModelError("model_type", model.config.model_type, "It has no attention head: ask for hidden attention.")
    hits = {s.name: torch.full((s.num_heads,), torch.nan if s.is_ssm and not hidden else 0.0) for s in specs}
    asked = 0
    for document in documents:
        batch = encode([document], tokenizer).to(model.device)
        queries_R, right_RT = _copies(batch)
        if not len(queries_R):
            continue
        for name, places_HR in _read_most(model, specs, batch.input_ids, queries_R, hidden).items():
            hits[name] += right_RT.gather(1, places_HR.T).sum(0).cpu()
        asked += len(queries_R)
    if not asked:
        raise ProbeError(
            "documents", f"{len(documents)} without a token to copy", "Give answers that stand in a segment."
        )
    return torch.cat([hits[spec.name] for spec in specs]) / asked


def _copies(batch: EncodedBatch) -> tuple[Tensor, Tensor]:
    """Of one document: (R,) tokens that predict an answer token, (R,T) where that token stands in the gold segment."""
    ids_T, answers_T, T = batch.input_ids[0], batch.answers[0], batch.input_ids.shape[1]
    places_T = torch.arange(T, device=ids_T.device)
    queries, right = [], []
    for query, start, end in zip(batch.query[0], batch.segment_start[0], batch.segment_end[0], strict=True):
        place = int(query)
        while start >= 0 and place + 1 < T and answers_T[place + 1]:
            same_T = (ids_T == ids_T[place + 1]) & (start <= places_T) & (places_T <= end)
            if same_T.any():
                queries.append(place)
                right.append(same_T)
            place += 1
    if not queries:
        return places_T[:0], torch.zeros(0, T, dtype=torch.bool, device=ids_T.device)
    return torch.tensor(queries, device=ids_T.device), torch.stack(right)


def _read_most(
    model: PreTrainedModel, specs: Sequence[MixerSpec], ids_1T: Tensor, queries_R: Tensor, hidden: bool
) -> dict[str, Tensor]:
    """By mixer, (H,R) the token that each head reads most at each query of one unpadded text."""
    ssm, attention = [s for s in specs if s.is_ssm and hidden], [s for s in specs if not s.is_ssm]
    with ExitStack() as stack:
        trace = stack.enter_context(record(model, ssm)) if ssm else Trace()
        found = stack.enter_context(_attention(model, attention, queries_R))
        model(ids_1T, use_cache=False, logits_to_keep=1)
    for spec in ssm:
        found[spec.name] = _mixed_in(model, spec, trace.projected[spec.name], queries_R).argmax(-1)
    return found


def _mixed_in(model: PreTrainedModel, spec: MixerSpec, projected_1TC: Tensor, queries_R: Tensor) -> Tensor:
    """(H,R,T) the size of what an SSM head mixes in from each token, squared: over channels, `(a[t,s] x_s)^2`."""
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    streams = structure.streams(mixer, spec, projected_1TC)
    a_CRT = structure.hidden_attention(mixer, spec, streams)[0, :, queries_R]  # C: heads, or all their channels
    a_HPRT = a_CRT.unflatten(0, (spec.num_heads, -1)).float()
    x_HPT = streams.x[0].permute(1, 2, 0).float()
    if a_HPRT.shape[1] == 1:
        return a_HPRT[:, 0].pow(2) * x_HPT.pow(2).sum(1)[:, None]
    return torch.einsum("hprt,hpt->hrt", a_HPRT.pow(2), x_HPT.pow(2))


@contextmanager
def _attention(model: PreTrainedModel, specs: Sequence[MixerSpec], queries_R: Tensor) -> Iterator[dict[str, Tensor]]:
    """Fills in, for the pass that runs inside, (H,R) the token with the largest attention weight, by mixer.

    The model attends by SDPA meanwhile, behind which queries and keys are seen; layers may share a module, so they
    are told apart by their order.
    """
    found: dict[str, Tensor] = {}
    if not specs:
        yield found
        return
    inside = {id(module) for spec in specs for module in mixer_of(model, spec).modules()}
    waiting = iter(specs)
    original, implementation = ALL_ATTENTION_FUNCTIONS["sdpa"], model.config._attn_implementation

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
        if id(module) in inside:
            found[next(waiting).name] = _largest(query[0], key[0], mask, queries_R)
        return original(module, query, key, value, mask, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    model.config._attn_implementation = "sdpa"
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original
        model.config._attn_implementation = implementation
    if len(found) < len(specs):
        raise ModelError("attention", specs[len(found)].name, "It was never called, so nothing was measured.")


def _largest(query_HTK: Tensor, key_GTK: Tensor, mask: Tensor | None, queries_R: Tensor) -> Tensor:
    """(H,R) where the softmax of the causal scores is largest; its scale does not matter."""
    H, T, _ = query_HTK.shape
    key_HTK = key_GTK.repeat_interleave(H // len(key_GTK), 0)
    scores_HRT = query_HTK[:, queries_R].float() @ key_HTK.float().transpose(1, 2)
    later_RT = torch.arange(T, device=queries_R.device) > queries_R[:, None]
    if mask is not None:  # of a sliding window
        later_RT = later_RT | ~mask[0, 0, queries_R]
    return scores_HRT.masked_fill(later_RT, -torch.inf).argmax(-1)


@contextmanager
def _removed(sweep: Sweep, spec: MixerSpec, naive: bool) -> Iterator[None]:
    """Of the mixer's output only the bias of its `out_proj` is left."""
    mixer, output_BTD = mixer_of(sweep.model, spec), sweep.trace.output[spec.name]
    left = torch.zeros_like(output_BTD)
    bias = structure_of(spec).out_proj(mixer).bias
    if bias is not None:
        left += bias
    if not naive:
        with from_mixer(sweep.model, spec, sweep.trace, left):
            yield
        return
    with hooked(sweep.model, sweep.specs) as hooks:
        hooks.after(spec.layer, spec.name, mixer, lambda out: (left, *out[1:]) if isinstance(out, tuple) else left)
        yield


def _logits(sweep: Sweep) -> Tensor:
    """(B,V) at the query."""
    inputs = arguments(sweep.model, sweep.batch.input_ids, sweep.mask)
    logits: Tensor = sweep.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def _level(sweep: Sweep, spec: MixerSpec, scale: float) -> Tensor:
    """(B,H) a factor for every head of the mixer, to take the gradient by."""
    u_BTI = sweep.trace.heads[spec.name]
    dtype = torch.promote_types(u_BTI.dtype, torch.float32)
    return torch.full((len(u_BTI), spec.num_heads), scale, dtype=dtype, device=u_BTI.device, requires_grad=True)


def _slopes(sweep: Sweep, factors: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of each prompt's margin by its own row of the factors, (B,H) each."""
    margin_B = choice_scores(_logits(sweep), sweep.batch).margin
    return torch.autograd.grad(margin_B.sum(), factors)


def _slope_at(sweep: Sweep, spec: MixerSpec, scale: float, naive: bool) -> Tensor:
    """(B,H) the derivative by a factor on each head, where all heads of the mixer are scaled."""
    with torch.enable_grad():
        factor_BH = _level(sweep, spec, scale)
        if naive:
            changed = factored(sweep.model, [spec], {spec.name: factor_BH})
        else:
            output_BTD = factored_output(sweep.model, spec, sweep.trace, factor_BH)
            changed = from_mixer(sweep.model, spec, sweep.trace, output_BTD)
        with changed:
            return _slopes(sweep, [factor_BH])[0]
