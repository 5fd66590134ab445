"""Score a model with heads ablated, or with oracle reads, reusing one clean run of each batch of prompts.

`out_proj` is linear, so ablating a head subtracts `u_h W_h` from the mixer's output. The mixer itself and the layers
below it do not run again. A change at the query alone needs one decode step from cached states, with all heads in one
batch (docs/LOCATE.md).

If a prompt's choices have several tokens, the changed model decodes them from its own states (`scoring/choices.py`). A
head that is ablated everywhere is also ablated at these tokens. Other changes apply to the prompt only: at the tokens
of the choices all heads run unchanged, on the states that the change produced.

Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width, R paths of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.data.choice_scores import completed
from surgery.data.ranking import ChoiceScores
from surgery.locate.ablation import Ablation, ablated, fill_values, token_mask
from surgery.locate.clean_run import CleanPass, CleanRun, run_pass, scores_by_variant
from surgery.models.cache import branched, copied_bytes
from surgery.models.hooks import from_block, from_mixer, hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.oracle_read import OracleRead, intervene, mixed_at_query, values_at
from surgery.models.shared_states import from_shared_states, reading
from surgery.types import Fill, HeadId, MixerSpec, Reads

T = TypeVar("T")
READS: tuple[Reads, ...] = ("segment_end", "answer_token")


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
    tokens, batch = (None, run.batch) if run.narrowed is None else run.narrowed
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


def _memory(model: PreTrainedModel) -> int:
    """Bytes for one pass with folded variants. On a CPU, 32 MiB fit its caches and took half the time of 512 MiB."""
    return 2**29 if model.device.type == "cuda" else 2**25


def _chunks(items: Sequence[T], bytes_each: int, memory: int) -> Iterator[Sequence[T]]:
    """Split items into chunks that fit into memory, of at least one item."""
    size = max(1, memory // bytes_each)
    return (items[i : i + size] for i in range(0, len(items), size))


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
    """
    ablation, memory = ablation or Ablation(), memory or _memory(run.model)
    place = {spec.name: i for i, spec in enumerate(run.specs)}
    lowest = [min(place[head.mixer] for head in heads) for heads in sets]
    scores: dict[int, ChoiceScores] = {}
    for index, spec in enumerate(run.specs):
        # A block's streams are several times wider than its output.
        row = 64 * run.prompt.activations.output[spec.name][0].numel() + run.path_bytes
        from_here = [i for i, low in enumerate(lowest) if low == index]
        for chunk in _chunks(from_here, row * len(run.batch), memory):
            group = [sets[i] for i in chunk]
            share = 1 - spec.layer / run.model.config.num_hidden_layers
            run.passes += len(group) * (len(run.batch) + run.path_passes) * share
            change = partial(_ablated_above, run, spec, group, ablation)
            changed = run_changed(run, run.prompt, len(group), change, lowest=spec.layer)
            scores |= dict(zip(chunk, changed, strict=True))
    return [scores[i] for i in range(len(sets))]


@contextmanager
def _ablated_above(
    run: CleanRun, spec: MixerSpec, sets: Sequence[Sequence[HeadId]], ablation: Ablation, part: CleanPass
) -> Iterator[None]:
    """Start a pass after `spec`, the lowest mixer of these sets, without its heads. Ablate higher heads as they run.

    If another mixer of the same block has heads in a set, the pass starts before the block: in Zamba2 the block's
    attention runs before its SSM, and acts through the input of the SSM alone.
    """
    if any(head.layer == spec.layer and head.mixer != spec.name for heads in sets for head in heads):
        residual = part.residual(spec.layer, len(sets))
        with (
            from_block(run.model, spec, part.activations, residual),
            ablated_while_running(run, part, sets, ablation),
        ):
            yield
        return
    tokens = ablated_tokens(run, part, ablation)[..., None]
    output = part.activations.output[spec.name]
    changed = []
    for heads in sets:
        lost = contribution(run.model, part, spec, [h.head for h in heads if h.mixer == spec.name], ablation.fill)
        changed.append(torch.where(tokens, output - lost, output).to(output.dtype))
    above = [[head for head in heads if head.mixer != spec.name] for heads in sets]
    with (
        from_mixer(run.model, spec, part.activations, torch.cat(changed)),
        ablated_while_running(run, part, above, ablation),
    ):
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
    num_heads = {spec.name: spec.num_heads for spec in run.specs}
    masks: dict[str, Tensor] = {}
    for w, heads in enumerate(sets):
        for head in heads:
            shape, device = (len(sets), num_heads[head.mixer]), run.batch.input_ids.device
            mask = masks.setdefault(head.mixer, torch.zeros(shape, dtype=torch.bool, device=device))
            mask[w, head.head] = True
    if not masks:
        return nullcontext()
    u = part.activations.heads
    fills = {name: fill_values(u[name], part.batch, ablation.fill, part.owner) for name in masks}
    return ablated(run.model, run.specs, masks, ablated_tokens(run, part, ablation), fills)


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
    place = {spec.name: i for i, spec in enumerate(run.specs)}
    lowest = [min((place[h.mixer] for h in (*v.ablate, *(h for h, _ in v.oracle))), default=0) for v in variants]
    reads = reading(run.specs) if run.paths is None else ()
    # The copied states with what one step makes of them, and the streams of a block.
    streams = 64 * run.prompt.activations.output[run.specs[0].name][0, 0].numel() + run.path_bytes
    row = 4 * copied_bytes(run.before_query, {spec.layer for spec in reads}) + streams * len(run.batch)
    values: dict[tuple[str, Reads], Tensor] = {}
    scores: dict[int, ChoiceScores] = {}
    for index, spec in enumerate(run.specs):
        from_here = [i for i, low in enumerate(lowest) if low == index]
        for chunk in _chunks(from_here, row, memory or _memory(run.model)):
            change, cache = _change_from(run, spec, [variants[i] for i in chunk], reads, values, fills)
            changed = run_changed(run, run.query, len(chunk), change, cache, spec.layer)
            scores |= dict(zip(chunk, changed, strict=True))
    return [scores[i] for i in range(len(variants))]


def _change_from(
    run: CleanRun,
    lowest: MixerSpec,
    group: Sequence[Variant],
    reads: Sequence[MixerSpec],
    values: dict[tuple[str, Reads], Tensor],
    fills: Mapping[str, Tensor] | None,
) -> tuple[Callable[[CleanPass], AbstractContextManager[None]], Cache]:
    """Prepare variants from the block of their lowest mixer up: the change of a pass, and the states before it.

    The mixers of `reads` do not write their states.
    """
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
    activations, unchanged = run.query.activations, lowest if is_alone else None
    changes = (
        partial(from_shared_states, run.model, reads, cache, activations, unchanged),
        partial(intervene, run.model, run.specs, *changes_by_mixer(run, group, values), conv_states, fills),
    )
    return partial(_from_block_changed, run, lowest, W, changes), cache


@contextmanager
def _from_block_changed(
    run: CleanRun,
    lowest: MixerSpec,
    variants: int,
    changes: Sequence[Callable[[], AbstractContextManager[None]]],
    part: CleanPass,
) -> Iterator[None]:
    """Start a pass at the block of `lowest`. The changes apply to the pass of the query only."""
    with ExitStack() as stack:
        residual = part.residual(lowest.layer, variants)
        stack.enter_context(from_block(run.model, lowest, part.activations, residual))
        for change in changes if part is run.query else ():
            stack.enter_context(change())
        yield


def changes_by_mixer(
    run: CleanRun, variants: Sequence[Variant], values: dict[tuple[str, Reads], Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, OracleRead]]:
    """Arrange variants by mixer, for `intervene`. `values`: cache of `oracle_values`, to which new ones are added."""
    specs, values = {spec.name: spec for spec in run.specs}, {} if values is None else values
    W, B, device = len(variants), len(run.batch), run.batch.input_ids.device
    masks: dict[str, Tensor] = {}
    reads: dict[str, OracleRead] = {}
    for w, variant in enumerate(variants):
        for head in variant.ablate:
            off = torch.zeros(W, specs[head.mixer].num_heads, dtype=torch.bool, device=device)
            masks.setdefault(head.mixer, off)[w, head.head] = True
        for head, position in variant.oracle:
            spec, key = specs[head.mixer], (head.mixer, position)
            if key not in values:
                values[key] = oracle_values(run, spec, position)
            if head.mixer not in reads:
                is_read = torch.zeros(W, spec.num_heads, dtype=torch.bool, device=device)
                reads[head.mixer] = OracleRead(is_read, torch.zeros(W, B, spec.num_heads, spec.head_dim, device=device))
            reads[head.mixer].heads[w, head.head] = True
            reads[head.mixer].value[w, :, head.head] = values[key][:, head.head]
    return masks, reads


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
        run_pass(run.model, prompt, 1, None, None if run.narrowed is None else run.narrowed[0], use_cache=False)
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
