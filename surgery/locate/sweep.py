"""The three measurements of every head: ablation, its split by position, and the sharpen test.

Owns: what is run and how it is reused. Must never know: files, selection, statistics. METHOD 2.1-2.3:

- `out_proj` is linear, so ablating a head subtracts `u_h W_h` from the mixer's output; the mixer itself and everything
  below are never run again.
- At the query alone, ablation and the perfect read need one decode step from cached states, all heads in one batch.

Every fast path has a naive one (`naive=True`): the whole model, once for each head, with the head changed in place.
Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.capture import (
    PerfectRead,
    Trace,
    expand_cache,
    from_block,
    from_mixer,
    intervene,
    mixed_at_query,
    only_logits,
    record,
    values_at,
)
from surgery.evaluate.scoring import ChoiceScores, choice_scores
from surgery.families import block_of, family_of, mixer_of, structure_of
from surgery.heads import HeadId, MixerSpec, Reads
from surgery.probes.documents import EncodedBatch
from surgery.sizes import own_kv_bytes_per_token, state_bytes

READS: tuple[Reads, ...] = ("segment_end", "answer_token")


@dataclass(frozen=True)
class Variant:
    """One changed model: heads ablated at the query, heads that read perfectly and what they read."""

    ablate: tuple[HeadId, ...] = ()
    sharpen: tuple[tuple[HeadId, Reads], ...] = ()


class Sweep:
    """One batch of prompts, and everything about the clean model on it that the measurements share.

    Args:
        batch: left-padded prompts that end at the query (`encode(..., padding_side="left", until_answer=True)`).
        memory: bytes that the states or the residual streams of one folded pass may take. The clean pass of the
            batch comes on top: all layers' streams, about 4 * (D + 5 I) bytes a token and layer.
    """

    def __init__(self, model: PreTrainedModel, batch: EncodedBatch, memory: int = 2**29) -> None:
        self.model, self.batch, self.memory = model, batch, memory
        family = family_of(model.config)
        self.specs: tuple[MixerSpec, ...] = family.mixers(model.config)
        self.by_name = {spec.name: spec for spec in self.specs}
        self.cache_argument = family.cache_argument
        self.mask = None if bool(batch.attention_mask.all()) else batch.attention_mask
        self.tokens, self.narrow = _narrowed(batch)
        with torch.no_grad(), record(model, self.specs) as trace:
            self.trace: Trace = trace
            self.clean: ChoiceScores = self._score(self._run(1))[0]
        with torch.no_grad():
            prefix = None if self.mask is None else self.mask[:, :-1]
            inputs = self._inputs(batch.input_ids[:, :-1], prefix)
            self.cache = getattr(model(**inputs, use_cache=True, logits_to_keep=1), self.cache_argument)
        self._values: dict[tuple[str, Reads], Tensor] = {}

    def _inputs(self, input_ids: Tensor, mask: Tensor | None, past: int = 0) -> dict[str, Tensor | None]:
        """Arguments of a forward pass; models with positions count from the first real token."""
        if self.cache_argument == "cache_params":
            # A plain Mamba-1 would multiply its one new token with the whole mask.
            reads_keys = getattr(self.model.config, "splice", None) or not all(spec.is_ssm for spec in self.specs)
            stateless = past > 0 and not reads_keys
            return {"input_ids": input_ids, "attention_mask": None if stateless else mask}
        seen = mask if mask is not None else input_ids.new_ones(len(input_ids), past + input_ids.shape[1])
        positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, past:]
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}

    def _run(self, variants: int, whole: bool = False) -> Tensor:
        """(W*B,U) logits at the query of the prompts, repeated for the variants; of all V tokens if `whole`."""
        mask = None if self.mask is None else self.mask.repeat(variants, 1)
        inputs = self._inputs(self.batch.input_ids.repeat(variants, 1), mask)
        with nullcontext() if whole else only_logits(self.model, self.tokens):
            logits: Tensor = self.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits

    def _score(self, logits: Tensor) -> list[ChoiceScores]:
        """By variant."""
        return [choice_scores(x, self.narrow) for x in logits.split(len(self.batch))]

    @torch.no_grad()
    def ablated(self, spec: MixerSpec, context_only: bool = False, naive: bool = False) -> list[ChoiceScores]:
        """Every head of one mixer removed in turn, at all tokens or at all but the query."""
        heads = range(spec.num_heads)
        if naive:
            return [self._ablated_naively(spec, head, context_only) for head in heads]
        structure = structure_of(spec)
        weight = structure.out_proj(mixer_of(self.model, spec)).weight
        u, output = self.trace.heads[spec.name], self.trace.output[spec.name]
        found = []
        row = 64 * output[0].numel()  # what a block needs for one prompt: its streams are several times wider
        for group in _chunks(list(heads), max(1, self.memory // (row * len(self.batch)))):
            changed = []
            for head in group:
                columns = structure.weight_slices(spec, head).out
                contribution = (u[..., columns] @ weight[:, columns].T).to(output.dtype)
                if context_only:
                    contribution = torch.cat([contribution[:, :-1], torch.zeros_like(contribution[:, -1:])], 1)
                changed.append(output - contribution)
            with from_mixer(self.model, spec, self.trace, torch.cat(changed)):
                logits = self._run(len(group))
            found += self._score(logits)
        return found

    def _ablated_naively(self, spec: MixerSpec, head: int, context_only: bool) -> ChoiceScores:
        """The head's columns of `out_proj` are zeroed, at all tokens or at all but the last."""
        structure = structure_of(spec)
        columns = structure.weight_slices(spec, head).out
        upto = -1 if context_only else None
        with _zeroed_input(self.model, spec, columns, upto):
            return choice_scores(self._run(1, whole=True), self.batch)

    @torch.no_grad()
    def at_query(self, variants: Sequence[Variant], naive: bool = False) -> list[ChoiceScores]:
        """The model with each variant's heads changed at the query token alone."""
        row = 4 * self._cache_bytes()  # a copy of the states, and what one step makes of them
        at_once = 1 if naive else max(1, self.memory // (row * len(self.batch)))
        found: list[ChoiceScores] = []
        for group in _chunks(list(variants), at_once):
            found += self._run_naively(group[0]) if naive else self._decode(group)
        return found

    def _cache_bytes(self) -> int:
        """Of one prompt."""
        config, tokens = self.model.config, self.batch.input_ids.shape[1]
        return state_bytes(config) + tokens * own_kv_bytes_per_token(config)

    def _decode(self, variants: Sequence[Variant]) -> list[ChoiceScores]:
        """One decode step from the cached states, variants folded into the batch, from the lowest changed block on."""
        W = len(variants)
        touched = [h for v in variants for h in (*v.ablate, *(head for head, _ in v.sharpen))]
        lowest = min((self.by_name[h.mixer] for h in touched), key=lambda s: s.layer, default=self.specs[0])
        cache = expand_cache(self.cache, W, lowest.layer)
        states = {
            spec.name: cache.layers[spec.layer].conv_states[0].clone()
            for spec in self.specs
            if spec.is_ssm and spec.layer >= lowest.layer
        }
        below = self.trace.below[lowest.layer][:, -1:].repeat(W, 1, 1)
        mask = None if self.mask is None else self.mask.repeat(W, 1)
        past = self.batch.input_ids.shape[1] - 1
        inputs = self._inputs(self.batch.input_ids[:, -1:].repeat(W, 1), mask, past)
        ablate, sharpen = self._masks(variants)
        with (
            from_block(self.model, lowest, self.trace, below),
            intervene(self.model, self.specs, ablate, sharpen, conv_states=states),
            only_logits(self.model, self.tokens),
        ):
            logits = self.model(**inputs, **{self.cache_argument: cache}, use_cache=True).logits[:, -1]
        return self._score(logits)

    def _run_naively(self, variant: Variant) -> list[ChoiceScores]:
        with intervene(self.model, self.specs, *self._masks([variant])):
            return [choice_scores(self._run(1, whole=True), self.batch)]

    def _masks(self, variants: Sequence[Variant]) -> tuple[dict[str, Tensor], dict[str, PerfectRead]]:
        """The variants by mixer, as `intervene` takes them."""
        W, B, device = len(variants), len(self.batch), self.batch.input_ids.device
        ablate: dict[str, Tensor] = {}
        sharpen: dict[str, PerfectRead] = {}
        for w, variant in enumerate(variants):
            for head in variant.ablate:
                H = self.by_name[head.mixer].num_heads
                off = ablate.setdefault(head.mixer, torch.zeros(W, H, dtype=torch.bool, device=device))
                off[w, head.head] = True
            for head, column in variant.sharpen:
                spec = self.by_name[head.mixer]
                if head.mixer not in sharpen:
                    read = torch.zeros(W, spec.num_heads, dtype=torch.bool, device=device)
                    value = torch.zeros(W, B, spec.num_heads, spec.head_dim, device=device)
                    sharpen[head.mixer] = PerfectRead(read, value)
                sharpen[head.mixer].heads[w, head.head] = True
                sharpen[head.mixer].value[w, :, head.head] = self.perfect_values(spec, column)[:, head.head]
        return ablate, sharpen

    def perfect_values(self, spec: MixerSpec, reads: Reads) -> Tensor:
        """(B,H,P) what each head would mix in if it read the gold token alone, scaled to its usual output.

        The usual output is the root mean square, over the prompts, of the norm of what the head mixes in at the query.
        """
        key = (spec.name, reads)
        if key not in self._values:
            gold = getattr(self.batch, reads)[:, -1]
            x_BHP = values_at(self.model, spec, self.trace, self.cache, gold).float()
            usual_H = mixed_at_query(self.model, spec, self.trace).float().pow(2).sum(-1).mean(0).sqrt()
            unit = x_BHP / x_BHP.norm(dim=-1, keepdim=True).clamp(min=1e-9)
            self._values[key] = unit * usual_H[:, None]
        return self._values[key]


def _narrowed(batch: EncodedBatch) -> tuple[Tensor, EncodedBatch]:
    """The tokens that are choices of some prompt, (U,), and the batch with choices that index them."""
    tokens, places = batch.choice_ids.clamp(min=0).unique(return_inverse=True)
    return tokens, replace(batch, choice_ids=places.where(batch.choice_ids >= 0, -1))


@contextmanager
def _zeroed_input(model: PreTrainedModel, spec: MixerSpec, columns: slice, upto: int | None) -> Iterator[None]:
    """Zeroes channels at the input of one layer's `out_proj`, which layers above may share."""
    inside = False

    def enter(_: torch.nn.Module, __: tuple) -> None:
        nonlocal inside
        inside = True

    def leave(_: torch.nn.Module, __: tuple, ___: Any) -> None:
        nonlocal inside
        inside = False

    def zero(_: torch.nn.Module, args: tuple) -> tuple | None:
        if not inside:
            return None
        u = args[0].clone()
        u[:, :upto, columns] = 0
        return (u,)

    block = block_of(model, spec.layer, spec)
    out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
    handles = [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    handles.append(out_proj.register_forward_pre_hook(zero))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]
