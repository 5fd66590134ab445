"""Baselines for choosing a head or a layer: scores of one batch of prompts, to compare with the ablation sweep.

All but `retrieval_score` are about the margin or the answer at the query, and positive where the model loses by the
ablation:

- `attribution`: attribution patching (Nanda 2023; Syed, Rager, Conmy, arXiv 2310.10348), all heads in one pass;
- `integrated_gradients`: of one layer's head outputs, from 0 to their values (Sundararajan et al., arXiv 1703.01365);
- `retrieval_score`: how often a head looks at the token that is to be copied (Wu et al., arXiv 2404.15574);
- `layer_divergence`: KL of the answer's distribution without a mixer. KL-guided layer selection (arXiv 2512.20569)
  gives a student one attention layer at a time and distils it towards a teacher, to see how far the KL falls. This is
  the part of it that needs no training.

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
from surgery.interventions.hooks import ActivationCache, from_mixer, record
from surgery.interventions.scaling import scaled, scaled_output
from surgery.locate.ablation_sweep import CleanRun
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import Document
from surgery.scoring.choices import arguments
from surgery.scoring.ranking import choice_scores
from surgery.types import MixerSpec


def attribution(run: CleanRun) -> Tensor:
    """Estimate, to first order, the margin lost by ablating each head at every token.

    `sum over tokens and the head's channels of u * d margin / d u`, at the input of `out_proj`. One forward and one
    backward pass for all heads. The backward pass keeps the activations of all layers, so choose the batch size by
    that. A norm behind the head can turn the sign of its score.

    Returns:
        (heads, B) float32 on the CPU, in logits; heads in the order of `run.specs`.

    Raises:
        ModelError: a fused kernel bypasses an `out_proj`.
    """
    factors = {spec.name: head_factors(run, spec, 1.0) for spec in run.specs}
    with torch.enable_grad(), scaled(run.model, run.specs, factors):
        slopes = margin_slopes(run, list(factors.values()))
    return torch.cat([slope_BH.T for slope_BH in slopes]).float().cpu()


def integrated_gradients(run: CleanRun, steps: int = 5) -> Tensor:
    """Share out by head the margin's change from a layer without its heads to the layer as it is.

    For one mixer after the other, the gradient by its head outputs is averaged over `steps` scales of all of them, by
    the midpoint rule. With many steps a mixer's heads sum to what ablating them all costs. Each step is a forward and
    a backward pass from the mixer up.

    Args:
        steps: scales over which the gradient is averaged.

    Returns:
        (heads, B) float32 on the CPU, in logits; heads in the order of `run.specs`.

    Raises:
        RecipeError: `steps` is below 1.
    """
    if steps < 1:
        raise RecipeError("steps", steps, "Give 1 or more: the number of scales over which the gradient is averaged.")
    attributions = []
    for spec in run.specs:
        slopes: list[Tensor] = []
        for step in range(steps):
            with torch.enable_grad():
                factor_BH = head_factors(run, spec, (step + 0.5) / steps)
                output_BTD = scaled_output(run.model, spec, run.prompt.activations, factor_BH)
                with from_mixer(run.model, spec, run.prompt.activations, output_BTD):
                    slopes += margin_slopes(run, [factor_BH])
        attributions.append(torch.stack(slopes).mean(0).T)
    return torch.cat(attributions).float().cpu()


@torch.no_grad()
def layer_divergence(run: CleanRun) -> Tensor:
    """Measure how far the answer's distribution moves without a mixer: KL(clean || ablated) over all V tokens.

    The mixer's output is replaced by the bias of its `out_proj`, at every token. An MLP behind it stays. One forward
    pass from the mixer up for each.

    Returns:
        (mixers, B) float32 on the CPU, in nats; in the order of `run.specs`.
    """
    clean_BV = logits_at_query(run).float().log_softmax(-1)
    divergences = []
    for spec in run.specs:
        with from_mixer(run.model, spec, run.prompt.activations, bias_alone(run, spec)):
            ablated_BV = logits_at_query(run).float().log_softmax(-1)
        divergences.append((clean_BV.exp() * (clean_BV - ablated_BV)).sum(-1).clamp(min=0))  # below it is rounding
    return torch.stack(divergences).cpu()


def bias_alone(run: CleanRun, spec: MixerSpec) -> Tensor:
    """(B,T,D) the output of a mixer that is nothing but the bias of its `out_proj`."""
    output_BTD = torch.zeros_like(run.prompt.activations.output[spec.name])
    bias = structure_of(spec).out_proj(mixer_of(run.model, spec)).bias
    return output_BTD if bias is None else output_BTD + bias


def logits_at_query(run: CleanRun) -> Tensor:
    """(B,V) of a pass over the prompts."""
    inputs = arguments(run.model, run.batch.input_ids, run.prompt.mask)
    logits: Tensor = run.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def head_factors(run: CleanRun, spec: MixerSpec, scale: float) -> Tensor:
    """(B,H) a factor for every head of the mixer, with respect to which gradients are taken."""
    u_BTI = run.prompt.activations.heads[spec.name]
    dtype = torch.promote_types(u_BTI.dtype, torch.float32)
    return torch.full((len(u_BTI), spec.num_heads), scale, dtype=dtype, device=u_BTI.device, requires_grad=True)


def margin_slopes(run: CleanRun, factors: list[Tensor]) -> tuple[Tensor, ...]:
    """Run the prompts and differentiate each prompt's margin by its own row of the factors, (B,H) each."""
    margin_B = choice_scores(logits_at_query(run), run.batch).margin
    return torch.autograd.grad(margin_B.sum(), factors)


@torch.no_grad()
def retrieval_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    hidden: bool = False,
) -> Tensor:
    """Measure how often each head attends most to the token that is to be copied: retrieval heads (arXiv 2404.15574).

    The score is the share of answer tokens for which the head's largest attention weight, at the token that predicts
    it, is on that token inside the gold segment. Answers are teacher-forced, not generated. Answer tokens that do not
    occur in the segment are skipped. One pass for each document, unpadded.

    Args:
        hidden: score SSM heads too, by the size of what they mix in, `|a[t,s] x_s|`, with `a` the hidden attention.
            That takes (channels,T,T) numbers a layer in Mamba-1, (H,T,T) elsewhere.

    Returns:
        (heads,) float32 on the CPU, 0 to 1, in the order of the mixers; NaN for SSM heads without `hidden`.

    Raises:
        ModelError: the model has no attention head, and `hidden` is not set.
        ProbeError: no answer token occurs in a gold segment.
    """
    specs = family_of(model.config).mixers(model.config)
    if not hidden and all(spec.is_ssm for spec in specs):
        raise ModelError("model_type", model.config.model_type, "It has no attention head. Set hidden=True.")
    hits = {s.name: torch.full((s.num_heads,), torch.nan if s.is_ssm and not hidden else 0.0) for s in specs}
    copied = 0
    for document in documents:
        batch = encode([document], tokenizer).to(model.device)
        queries_R, right_RT = _copies(batch)
        if not len(queries_R):
            continue
        for name, places_HR in most_read(model, specs, batch.input_ids, queries_R, hidden).items():
            hits[name] += right_RT.gather(1, places_HR.T).sum(0).cpu()
        copied += len(queries_R)
    if not copied:
        hint = "Give documents whose answers occur in their gold segment."
        raise ProbeError("documents", f"{len(documents)} without a token to copy", hint)
    return torch.cat([hits[spec.name] for spec in specs]) / copied


def _copies(batch: EncodedBatch) -> tuple[Tensor, Tensor]:
    """Of one document: (R,) tokens that predict an answer token, (R,T) where that token is in the gold segment."""
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


def most_read(
    model: PreTrainedModel, specs: Sequence[MixerSpec], ids_1T: Tensor, queries_R: Tensor, hidden: bool
) -> dict[str, Tensor]:
    """Find the token that each head attends to most, at each query of one unpadded text: (H,R), by mixer."""
    ssm, attention = [s for s in specs if s.is_ssm and hidden], [s for s in specs if not s.is_ssm]
    with ExitStack() as stack:
        activations = stack.enter_context(record(model, ssm)) if ssm else ActivationCache()
        places = stack.enter_context(_attention_argmax(model, attention, queries_R))
        model(ids_1T, use_cache=False, logits_to_keep=1)
    for spec in ssm:
        places[spec.name] = contribution_sizes(model, spec, activations.projected[spec.name], queries_R).argmax(-1)
    return places


def contribution_sizes(model: PreTrainedModel, spec: MixerSpec, projected_1TC: Tensor, queries_R: Tensor) -> Tensor:
    """(H,R,T) the squared size of what an SSM head mixes in from each token: over channels, `(a[t,s] x_s)^2`."""
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    streams = structure.streams(mixer, spec, projected_1TC)
    a_CRT = structure.hidden_attention(mixer, spec, streams)[0, :, queries_R]  # C: heads, or all their channels
    a_HPRT = a_CRT.unflatten(0, (spec.num_heads, -1)).float()
    x_HPT = streams.x[0].permute(1, 2, 0).float()
    if a_HPRT.shape[1] == 1:
        return a_HPRT[:, 0].pow(2) * x_HPT.pow(2).sum(1)[:, None]
    return torch.einsum("hprt,hpt->hrt", a_HPRT.pow(2), x_HPT.pow(2))


@contextmanager
def _attention_argmax(
    model: PreTrainedModel, specs: Sequence[MixerSpec], queries_R: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Record, in the pass inside the context, (H,R) the token with the largest attention weight, by mixer.

    The model uses SDPA inside, through a function that sees queries and keys. Layers may share a module, so they are
    told apart by their order.
    """
    places: dict[str, Tensor] = {}
    if not specs:
        yield places
        return
    inside = {id(module) for spec in specs for module in mixer_of(model, spec).modules()}
    waiting = iter(specs)
    original, implementation = ALL_ATTENTION_FUNCTIONS["sdpa"], model.config._attn_implementation

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
        if id(module) in inside:
            places[next(waiting).name] = _largest(query[0], key[0], mask, queries_R)
        return original(module, query, key, value, mask, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    model.config._attn_implementation = "sdpa"
    try:
        yield places
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original
        model.config._attn_implementation = implementation
    if len(places) < len(specs):
        raise ModelError("attention", specs[len(places)].name, "It was never called, so nothing was measured.")


def _largest(query_HTK: Tensor, key_GTK: Tensor, mask: Tensor | None, queries_R: Tensor) -> Tensor:
    """(H,R) where the softmax of the causal scores is largest. Their scale does not matter."""
    H, T, _ = query_HTK.shape
    key_HTK = key_GTK.repeat_interleave(H // len(key_GTK), 0)
    scores_HRT = query_HTK[:, queries_R].float() @ key_HTK.float().transpose(1, 2)
    later_RT = torch.arange(T, device=queries_R.device) > queries_R[:, None]
    if mask is not None:  # of a sliding window
        later_RT = later_RT | ~mask[0, 0, queries_R]
    return scores_HRT.masked_fill(later_RT, -torch.inf).argmax(-1)
