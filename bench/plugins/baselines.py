"""Baselines for choosing a head or a layer, to compare with the ablation sweep. Each scores one batch of prompts.

    PYTHONPATH=. surgery locate quickstart plugins=[bench.plugins.baselines] \\
        locate.methods=[attribution,integrated_gradients,layer_divergence,retrieval_score] splice.select=attribution

- `attribution`: attribution patching (Nanda 2023; Syed, Rager, Conmy, arXiv 2310.10348), all heads in one pass.
- `integrated_gradients`: of one layer's head outputs, from 0 to their values (Sundararajan et al., arXiv 1703.01365).
- `retrieval_score`: how often a head attends most to the token to copy (Wu et al., arXiv 2404.15574).
- `layer_divergence`: KL of the answer's distribution without a mixer. KL-guided layer selection (arXiv 2512.20569)
  trains a student with one attention layer at a time and compares the KL to the teacher that remains. This score is
  the part that needs no training.

paper/HEAD_CHOICE.md has the hybrids that were trained with the heads of each. All but `retrieval_score` measure the
margin or the answer at the query. A positive score means that the model gets worse by the ablation.

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

from bench.plugins.scaling import scaled, scaled_output
from surgery.data.choice_scores import arguments
from surgery.data.encoding import EncodedBatch, encode
from surgery.data.ranking import choice_scores
from surgery.errors import ModelError, ProbeError, RecipeError
from surgery.locate.clean_run import CleanRun
from surgery.locate.methods import Column, LocateBatch, register_method
from surgery.models.hooks import ActivationCache, from_mixer, record
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import Document
from surgery.types import MixerSpec


def attribution(run: CleanRun) -> Tensor:
    """Estimate, to first order, the margin lost by ablating each head at every token.

    The score is the sum of `u * d margin / d u` over tokens and the head's channels, with u the input of `out_proj`. It
    takes one forward and one backward pass for all heads. The backward pass keeps the activations of all layers, which
    limits the batch size. A norm after the head can flip the sign of its score.

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
    """Attribute the margin that a whole mixer contributes to its heads, by integrated gradients.

    The gradient with respect to the head outputs of one mixer is averaged along a path that scales them all from 0 to
    1, by the midpoint rule. With many steps, the scores of a mixer's heads sum to the margin lost by ablating all of
    them. Each step takes a forward and a backward pass from the mixer up.

    Args:
        steps: number of points on the path.

    Returns:
        (heads, B) float32 on the CPU, in logits; heads in the order of `run.specs`.

    Raises:
        RecipeError: `steps` is below 1.
    """
    if steps < 1:
        raise RecipeError("steps", steps, "Set the number of gradients to average, 1 or more.")
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
    """Measure how much the answer's distribution changes without each mixer: KL(clean || ablated) over all V tokens.

    The mixer's output is replaced by the bias of its `out_proj`, at every token. An MLP after it still runs. Each mixer
    takes one forward pass from the mixer up.

    Returns:
        (mixers, B) float32 on the CPU, in nats; in the order of `run.specs`.
    """
    clean_BV = logits_at_query(run).float().log_softmax(-1)
    divergences = []
    for spec in run.specs:
        with from_mixer(run.model, spec, run.prompt.activations, bias_alone(run, spec)):
            ablated_BV = logits_at_query(run).float().log_softmax(-1)
        divergences.append((clean_BV.exp() * (clean_BV - ablated_BV)).sum(-1).clamp(min=0))  # negative by rounding only
    return torch.stack(divergences).cpu()


def bias_alone(run: CleanRun, spec: MixerSpec) -> Tensor:
    """(B,T,D) output of a mixer whose heads are all ablated: the bias of its `out_proj`."""
    output_BTD = torch.zeros_like(run.prompt.activations.output[spec.name])
    bias = structure_of(spec).out_proj(mixer_of(run.model, spec)).bias
    return output_BTD if bias is None else output_BTD + bias


def logits_at_query(run: CleanRun) -> Tensor:
    """(B,V) logits at the query, of one pass over the prompts."""
    inputs = arguments(run.model, run.batch.input_ids, run.prompt.mask)
    logits: Tensor = run.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def head_factors(run: CleanRun, spec: MixerSpec, scale: float) -> Tensor:
    """(B,H) leaf tensor with a factor for every head of the mixer, for gradients with respect to it."""
    u_BTI = run.prompt.activations.heads[spec.name]
    dtype = torch.promote_types(u_BTI.dtype, torch.float32)
    return torch.full((len(u_BTI), spec.num_heads), scale, dtype=dtype, device=u_BTI.device, requires_grad=True)


def margin_slopes(run: CleanRun, factors: list[Tensor]) -> tuple[Tensor, ...]:
    """Run the prompts and compute the gradient of each prompt's margin by its row of the factors, (B,H) each."""
    margin_B = choice_scores(logits_at_query(run), run.batch).margin
    return torch.autograd.grad(margin_B.sum(), factors)


@torch.no_grad()
def retrieval_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    hidden: bool = False,
) -> Tensor:
    """Measure how often each head attends most to the token to copy: retrieval heads (arXiv 2404.15574).

    At the position that predicts an answer token, a hit is a largest attention weight on that same token inside the
    gold segment. The score is the fraction of hits. Answers are teacher-forced, not generated. Answer tokens that do
    not occur in the segment are skipped. Each document takes one unpadded pass.

    Args:
        hidden: score SSM heads too, by the magnitude of what they mix in, `|a[t,s] x_s|`, with `a` the hidden
            attention. It needs (channels,T,T) numbers per layer in Mamba-1, (H,T,T) in other models.

    Returns:
        (heads,) float32 on the CPU, 0 to 1, in the order of the mixers; NaN for SSM heads without `hidden`.

    Raises:
        ModelError: the model has no attention head, and `hidden` is not set.
        ProbeError: no answer token occurs in a gold segment.
    """
    specs = family_of(model.config).mixers(model.config)
    if not hidden and all(spec.is_ssm for spec in specs):
        raise ModelError(
            "model_type", model.config.model_type, "It has no attention head. Set hidden=True to score SSM heads."
        )
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
        hint = "Pass documents whose answers occur in their gold segment."
        raise ProbeError("documents", f"{len(documents)} without a token to copy", hint)
    return torch.cat([hits[spec.name] for spec in specs]) / copied


def _copies(batch: EncodedBatch) -> tuple[Tensor, Tensor]:
    """Positions of one document that predict an answer token, (R,), and where the gold segment has it, (R,T)."""
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
    """(H,R,T) squared magnitude of what an SSM head mixes in from each token: `(a[t,s] x_s)^2` summed over channels."""
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    streams = structure.streams(mixer, spec, projected_1TC).in_fp32()
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
    """Record the token with the largest attention weight, (H,R) by mixer, in the forward pass inside the context.

    The model uses SDPA there, through a function that sees queries and keys. Layers may share a module, so they are
    identified by their order.
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
        hint = "It bypasses the attention interface of transformers. Remove retrieval_score from locate.methods."
        raise ModelError("attention", specs[len(places)].name, hint)


def _largest(query_HTK: Tensor, key_GTK: Tensor, mask: Tensor | None, queries_R: Tensor) -> Tensor:
    """(H,R) token with the largest causal attention score. The scale of the scores does not matter."""
    H, T, _ = query_HTK.shape
    key_HTK = key_GTK.repeat_interleave(H // len(key_GTK), 0)
    scores_HRT = query_HTK[:, queries_R].float() @ key_HTK.float().transpose(1, 2)
    later_RT = torch.arange(T, device=queries_R.device) > queries_R[:, None]
    if mask is not None:  # of a sliding window
        later_RT = later_RT | ~mask[0, 0, queries_R]
    return scores_HRT.masked_fill(later_RT, -torch.inf).argmax(-1)


@register_method(
    "attribution",
    [Column("attribution", "margin lost by ablating the head, to first order")],
    ranks=True,
    passes=3,
)
def attribution_of_batch(batch: LocateBatch) -> dict[str, Tensor]:
    """Estimate each head's ablation by attribution patching."""
    return {"attribution": attribution(batch.run)}


@register_method(
    "integrated_gradients",
    [Column("integrated_gradients", "margin lost by ablating the head, integrated over its layer")],
    ranks=True,
    passes_per_mixer=15,
)
def integrated_gradients_of_batch(batch: LocateBatch) -> dict[str, Tensor]:
    """Compute integrated gradients in 5 steps, each a forward and a backward pass."""
    return {"integrated_gradients": integrated_gradients(batch.run)}


@register_method(
    "layer_divergence",
    [Column("layer_divergence", "KL of the answer's distribution without the head's whole mixer", unit="nats")],
    ranks=True,
    passes=1,
    passes_per_mixer=1,
)
def layer_divergence_of_batch(batch: LocateBatch) -> dict[str, Tensor]:
    """Measure the KL divergence without each mixer. Every head of the mixer gets its score."""
    num_heads = torch.tensor([spec.num_heads for spec in batch.run.specs])
    return {"layer_divergence": layer_divergence(batch.run).repeat_interleave(num_heads, 0)}


@register_method(
    "retrieval_score",
    [Column("retrieval_score", "how often the head attends most to the token to be copied", unit="share")],
    passes=1,
    needs_text=True,
)
def retrieval_score_of_batch(batch: LocateBatch) -> dict[str, Tensor]:
    """Score retrieval heads, SSM heads by their hidden attention. NaN for prompts without a token to copy."""
    run, scores = batch.run, []
    for document in batch.documents or ():
        try:
            scores.append(retrieval_score(run.model, batch.tokenizer, [document], hidden=True))
        except ProbeError:  # as the tokenizer splits them, answer and segment have no token in common
            scores.append(torch.full((sum(spec.num_heads for spec in run.specs),), torch.nan))
    return {"retrieval_score": torch.stack(scores, 1)}
