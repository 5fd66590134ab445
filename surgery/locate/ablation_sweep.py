"""Score a model with heads ablated, or with oracle reads, reusing one clean run of each batch of prompts.

`out_proj` is linear, so ablating a head subtracts `u_h W_h` from the mixer's output. The mixer itself and the layers
below it do not run again. A change at the query alone needs one decode step from cached states, with all heads in one
batch (docs/LOCATE.md).

If a prompt's choices have several tokens, the changed model decodes them from its own states
(`surgery.data.choice_scores`). A head that is ablated everywhere is also ablated at these tokens. Other changes apply
to the prompt only: at the tokens of the choices all heads run unchanged, on the states that the change produced.

Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width, R paths of all prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.data.choice_scores import completed
from surgery.data.ranking import ChoiceScores
from surgery.errors import ModelError
from surgery.locate.ablation import Ablation, fill_values, token_mask
from surgery.locate.clean_run import CleanPass, CleanRun, run_pass, scores_by_variant
from surgery.models.cache import branched, copied_bytes
from surgery.models.hooks import from_block, from_mixer, hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.oracle_read import OracleRead, intervene, mixed_at_query, values_at
from surgery.models.shared_states import from_shared_states, reading
from surgery.types import Fill, HeadId, MixerSpec, Reads


@dataclass(frozen=True)
class Variant:
    """A model changed at the query.

    Attributes:
        ablate: heads that are ablated: their outputs are replaced by zeros, or by the fills of `change_at_query`.
        oracle: heads with an oracle read, and the position that each one reads.
    """

    ablate: tuple[HeadId, ...] = ()
    oracle: tuple[tuple[HeadId, Reads], ...] = ()


def run_changed(
    run: CleanRun,
    first: CleanPass,
    variants: int,
    change: Callable[[CleanPass], AbstractContextManager[None]],
    cache: Cache | None = None,
    lowest: int = 0,
) -> list[ChoiceScores]:
    """Score changed models: run a pass up to the query and then the paths, each inside the context `change`.

    Args:
        first: `run.prompt`, or `run.query` with the cache before it.
        change: context manager for a pass. It changes variant w in rows w*B to (w+1)*B - 1.
        cache: states before the query; None if the whole prompts run.
        lowest: layer of the first block that runs.
    """
    model, paths = run.model, run.paths
    tokens, batch = run.narrowed
    use_cache = cache is not None or paths is not None
    with change(first):
        logits, cache = run_pass(model, first, variants, cache, tokens, use_cache)
    all_logits = [logits]
    if paths is not None:
        begin = torch.arange(variants, device=logits.device)[:, None] * len(batch)
        cache = completed(cache, first.cache, variants, lowest)
        cache = branched(cache, (begin + paths.owner).flatten(), lowest)
    for step in run.steps:
        with change(step):
            logits, cache = run_pass(model, step, variants, cache, tokens, use_cache)
        cache = completed(cache, step.cache, variants, lowest)
        all_logits.append(logits)
    return scores_by_variant(all_logits, batch, paths)


def _by_lowest_mixer(
    run: CleanRun,
    sets: Sequence[Sequence[HeadId]],
    bytes_each: Callable[[MixerSpec], int],
    memory: int | None,
    score: Callable[[MixerSpec, list[int]], list[ChoiceScores]],
) -> list[ChoiceScores]:
    """Score sets of heads that have their lowest mixer in common, and fit into memory, together.

    Args:
        bytes_each: bytes of one set, by its lowest mixer.
        memory: bytes for the sets that are scored together, at least one. On a CPU, the default of 32 MiB fits its
            caches and took half the time of 512 MiB.
        score: function from the lowest mixer and indices of sets to their scores.
    """
    memory = memory or (2**29 if run.model.device.type == "cuda" else 2**25)
    place = {spec.name: i for i, spec in enumerate(run.specs)}
    lowest = [min((place[head.mixer] for head in heads), default=0) for heads in sets]
    scores: dict[int, ChoiceScores] = {}
    for index, spec in enumerate(run.specs):
        from_here = [i for i, low in enumerate(lowest) if low == index]
        size = max(1, memory // bytes_each(spec))
        for chunk in (from_here[start : start + size] for start in range(0, len(from_here), size)):
            scores |= dict(zip(chunk, score(spec, chunk), strict=True))
    return [scores[i] for i in range(len(sets))]


def _masks(run: CleanRun, sets: Sequence[Sequence[HeadId]]) -> dict[str, Tensor]:
    """By `MixerSpec.name`, (W,H) bool: the heads of each set."""
    num_heads = {spec.name: spec.num_heads for spec in run.specs}
    masks: dict[str, Tensor] = {}
    for w, heads in enumerate(sets):
        for head in heads:
            none = torch.zeros(len(sets), num_heads[head.mixer], dtype=torch.bool, device=run.batch.input_ids.device)
            masks.setdefault(head.mixer, none)[w, head.head] = True
    return masks


@torch.no_grad()
def ablate(
    run: CleanRun, sets: Sequence[Sequence[HeadId]], ablation: Ablation | None = None, memory: int | None = None
) -> list[ChoiceScores]:
    """Score the model without each set of heads: single heads, whole layers, or heads of several layers together.

    Only the blocks above a set's lowest mixer run. The contributions of that mixer's heads are subtracted from its
    clean output. Other mixers of the set are changed while they run.

    Args:
        ablation: by default zeros, everywhere.
        memory: bytes that the residual streams of one pass may take.

    Raises:
        ModelError: the clean query was a decode step.
    """
    if run.prompt.activations.tokens is not None:
        raise ModelError("ablate", "a clean run by steps", "Register its method without `decode_step`.")

    def bytes_each(spec: MixerSpec) -> int:
        # A block's streams are several times wider than its output.
        return (64 * run.prompt.activations.output[spec.name][0].numel() + run.path_bytes) * len(run.batch)

    def score(spec: MixerSpec, chunk: list[int]) -> list[ChoiceScores]:
        share = 1 - spec.layer / run.model.config.num_hidden_layers
        run.passes += len(chunk) * (len(run.batch) + run.path_passes) * share
        change = partial(_ablated_above, run, spec, [sets[i] for i in chunk], ablation or Ablation())
        return run_changed(run, run.prompt, len(chunk), change, lowest=spec.layer)

    return _by_lowest_mixer(run, sets, bytes_each, memory, score)


@contextmanager
def _ablated_above(
    run: CleanRun, spec: MixerSpec, sets: Sequence[Sequence[HeadId]], ablation: Ablation, part: CleanPass
) -> Iterator[None]:
    """Start a pass after `spec`, the lowest mixer of these sets, without its heads. Ablate higher heads as they run.

    If another mixer of the same block has heads in a set, the pass starts before the block: in Zamba2 the block's
    attention runs before its SSM, and acts through the input of the SSM alone.
    """
    if any(head.layer == spec.layer and head.mixer != spec.name for heads in sets for head in heads):
        start = from_block(run.model, spec, part.activations, part.residual(spec.layer, len(sets)))
    else:
        tokens, output = ablated_tokens(run, part, ablation)[..., None], part.activations.output[spec.name]
        changed = []
        for heads in sets:
            lost = contribution(run.model, part, spec, [h.head for h in heads if h.mixer == spec.name], ablation.fill)
            changed.append(torch.where(tokens, output - lost, output).to(output.dtype))
        start = from_mixer(run.model, spec, part.activations, torch.cat(changed))
        sets = [[head for head in heads if head.mixer != spec.name] for heads in sets]
    with start, ablated_while_running(run, part, sets, ablation):
        yield


def ablated_tokens(run: CleanRun, part: CleanPass, ablation: Ablation) -> Tensor:
    """(rows,tokens) bool: True at the tokens of a pass at which heads are ablated."""
    if part is run.prompt:
        return token_mask(run.batch, ablation.where)
    return torch.full_like(part.batch.input_ids, ablation.where == "everywhere", dtype=torch.bool)


def contribution(model: PreTrainedModel, part: CleanPass, spec: MixerSpec, heads: Sequence[int], fill: Fill) -> Tensor:
    """Sum the contributions of heads to their mixer's output, minus those of the values that replace them.

    Returns:
        (rows,tokens,D) in fp32 at least.
    """
    structure, u = structure_of(spec), part.activations.heads[spec.name]
    weight, values = structure.out_proj(mixer_of(model, spec)).weight, fill_values(u, part.batch, fill, part.owner)
    exact = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros_like(part.activations.output[spec.name], dtype=exact)
    for head in heads:
        columns = structure.weight_slices(spec, head).out
        change = u[..., columns].to(exact) - (0 if values is None else values[..., columns].to(exact))
        total += change @ weight[:, columns].T.to(exact)
    return total


def ablated_while_running(
    run: CleanRun, part: CleanPass, sets: Sequence[Sequence[HeadId]], ablation: Ablation
) -> AbstractContextManager[None]:
    """Ablate one set of heads in each variant of a pass, at the input of `out_proj`."""
    masks, u = _masks(run, sets), part.activations.heads
    if not masks:
        return nullcontext()
    fills = {name: fill_values(u[name], part.batch, ablation.fill, part.owner) for name in masks}
    tokens_BT = ablated_tokens(run, part, ablation)
    return intervene(run.model, run.specs, masks, {}, fills=fills, tokens_BT=tokens_BT)


@torch.no_grad()
def change_at_query(
    run: CleanRun,
    variants: Sequence[Variant],
    memory: int | None = None,
    fills: Mapping[str, Tensor] | None = None,
) -> list[ChoiceScores]:
    """Score models changed at the query token alone, by one decode step from the cached states.

    Variants are folded into the batch and run from the lowest changed block up. If no token follows the query, all
    variants of a prompt read the same SSM states, and none writes the states after the query.

    Args:
        memory: bytes that the tensors of one step may take.
        fills: by `MixerSpec.name`, (B,I) values that replace the outputs of ablated heads. By default zeros.
    """
    reads = reading(run.specs) if run.paths is None else ()
    # The copied states with what one step makes of them, and the streams of a block.
    streams = 64 * run.prompt.activations.output[run.specs[0].name][0, 0].numel() + run.path_bytes
    row = 4 * copied_bytes(run.before_query, {spec.layer for spec in reads}) + streams * len(run.batch)
    values = functools.cache(partial(oracle_values, run))

    def score(spec: MixerSpec, chunk: list[int]) -> list[ChoiceScores]:
        return _score_from(run, spec, [variants[i] for i in chunk], reads, values, fills)

    changed = [(*variant.ablate, *(head for head, _ in variant.oracle)) for variant in variants]
    return _by_lowest_mixer(run, changed, lambda _: row, memory, score)


def _score_from(
    run: CleanRun,
    lowest: MixerSpec,
    group: Sequence[Variant],
    reads: Sequence[MixerSpec],
    values: Callable[[MixerSpec, Reads], Tensor],
    fills: Mapping[str, Tensor] | None,
) -> list[ChoiceScores]:
    """Score variants from the block of their lowest mixer up. The mixers of `reads` do not write their states."""
    W, (B, T), config = len(group), run.batch.input_ids.shape, run.model.config
    run.passes += W * (B / T + run.path_passes) * (1 - lowest.layer / config.num_hidden_layers)
    reads = [spec for spec in reads if spec.layer >= lowest.layer]
    rows = torch.arange(B, device=run.batch.input_ids.device).repeat(W)
    cache = branched(run.before_query, rows, lowest.layer, {spec.layer for spec in reads})
    conv_states = {
        spec.name: state if spec in reads else state.clone()
        for spec in run.specs
        if spec.is_ssm and spec.layer >= lowest.layer
        for state in [cache.layers[spec.layer].conv_states[0]]
    }
    is_alone = sum(spec.layer == lowest.layer for spec in run.specs) == 1
    masks, oracle_reads = changes_by_mixer(run, group, values)

    @contextmanager
    def change(part: CleanPass) -> Iterator[None]:
        """Start a pass at the block of `lowest`. Only the pass of the query is changed."""
        with ExitStack() as stack:
            stack.enter_context(from_block(run.model, lowest, part.activations, part.residual(lowest.layer, W)))
            if part is run.query:
                unchanged = lowest if is_alone else None
                stack.enter_context(from_shared_states(run.model, reads, cache, part.activations, unchanged))
                stack.enter_context(intervene(run.model, run.specs, masks, oracle_reads, conv_states, fills))
            yield

    return run_changed(run, run.query, W, change, cache, lowest.layer)


def changes_by_mixer(
    run: CleanRun, variants: Sequence[Variant], values: Callable[[MixerSpec, Reads], Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, OracleRead]]:
    """Arrange variants by mixer, for `intervene`. `values` are those of `oracle_values`, which may be cached."""
    specs, values = {spec.name: spec for spec in run.specs}, values or partial(oracle_values, run)
    reads: dict[str, OracleRead] = {}
    for name, heads_WH in _masks(run, [[head for head, _ in variant.oracle] for variant in variants]).items():
        shape = (len(variants), len(run.batch), *heads_WH.shape[1:], specs[name].head_dim)
        reads[name] = OracleRead(heads_WH, torch.zeros(shape, device=heads_WH.device))
    for w, variant in enumerate(variants):
        for head, position in variant.oracle:
            reads[head.mixer].value[w, :, head.head] = values(specs[head.mixer], position)[:, head.head]
    return _masks(run, [variant.ablate for variant in variants]), reads


@torch.no_grad()
def outputs_at_query(run: CleanRun, input_ids: Tensor) -> dict[str, Tensor]:
    """Run other prompts of the same lengths, and record the output of every head at the query.

    Args:
        input_ids: (B,T), padded as the prompts of `run`.

    Returns:
        By `MixerSpec.name`, (B,I) input of `out_proj`.
    """
    outputs: dict[str, Tensor] = {}
    prompt = replace(run.prompt, batch=replace(run.batch, input_ids=input_ids))

    def store_last(name: str, args: tuple) -> None:
        outputs[name] = args[0][:, -1].clone()

    with hooked(run.model, run.specs) as hooks:
        for spec in run.specs:
            out_proj = structure_of(spec).out_proj(mixer_of(run.model, spec))
            hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, partial(store_last, spec.name))
        run_pass(run.model, prompt, 1, None, run.narrowed[0], use_cache=False)
    run.passes += len(run.batch)
    return outputs


@torch.no_grad()
def oracle_values(run: CleanRun, spec: MixerSpec, position: Reads) -> Tensor:
    """Compute what each head would mix in if it read the gold token alone, scaled to its usual output.

    The usual output is the root mean square, over the prompts, of the norm of what the head mixes in at the query.

    Returns:
        (B,H,P)
    """
    activations = run.prompt.activations
    gold = run.batch.last_read(position)
    x_BHP = values_at(run.model, spec, activations, run.before_query, gold).float()
    usual_H = mixed_at_query(run.model, spec, activations).float().pow(2).sum(-1).mean(0).sqrt()
    unit = x_BHP / x_BHP.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    return unit * usual_H[:, None]
