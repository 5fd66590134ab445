"""The three measurements of every head: ablation, its split by position, and the sharpen test.

Owns: what is run and how it is reused. Must never know: files, selection, statistics. METHOD 2.1-2.3:

- `out_proj` is linear, so ablating a head subtracts `u_h W_h` from the mixer's output; the mixer itself and everything
  below are never run again.
- At the query alone, ablation and the perfect read need one decode step from cached states, all heads in one batch.

Every fast path has a naive one (`naive=True`): the whole model, once for each head, with the head changed in place.
Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

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
from surgery.families import family_of, mixer_of, structure_of
from surgery.heads import Fill, HeadId, MixerSpec, Reads
from surgery.probes.documents import EncodedBatch
from surgery.removal import Removal, baseline, replaced, tokens_of
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

    Attributes:
        passes: what was run so far, in full forward passes of one prompt.
    """

    def __init__(self, model: PreTrainedModel, batch: EncodedBatch, memory: int = 2**29) -> None:
        self.model, self.batch, self.memory = model, batch, memory
        self.passes = 0.0
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
        self.passes += 2.0 * len(batch)
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
    def without(
        self, sets: Sequence[Sequence[HeadId]], removal: Removal | None = None, naive: bool = False
    ) -> list[ChoiceScores]:
        """The model without each set of heads: single heads, whole layers, or heads of several layers together.

        Only the blocks above a set's lowest mixer are run. Removing one head there subtracts its contribution from
        what the clean mixer put out; other mixers of the set are changed while they run.
        """
        removal = removal or Removal()
        tokens_BT = tokens_of(self.batch, removal.where)
        if naive:
            return [self._without_naively(heads, tokens_BT, removal.fill) for heads in sets]
        place = {spec.name: i for i, spec in enumerate(self.specs)}
        lowest = [min(place[head.mixer] for head in heads) for heads in sets]
        found: dict[int, ChoiceScores] = {}
        for index, spec in enumerate(self.specs):
            mine = [i for i, low in enumerate(lowest) if low == index]
            row = (
                64 * self.trace.output[spec.name][0].numel()
            )  # of one prompt: a block's streams are several times wider
            for group in _chunks(mine, max(1, self.memory // (row * len(self.batch)))):
                scores = self._without_from(spec, [sets[i] for i in group], tokens_BT, removal.fill)
                found |= dict(zip(group, scores, strict=True))
        return [found[i] for i in range(len(sets))]

    def _without_from(
        self, spec: MixerSpec, sets: Sequence[Sequence[HeadId]], tokens_BT: Tensor, fill: Fill
    ) -> list[ChoiceScores]:
        """Sets whose lowest mixer is `spec`, in one pass."""
        own = [self._contribution(spec, [h.head for h in heads if h.mixer == spec.name], fill) for heads in sets]
        output = self.trace.output[spec.name]
        kept = [torch.where(tokens_BT[..., None], output - x, output).to(output.dtype) for x in own]
        masks, fills = self._above(spec, sets, fill)
        self.passes += len(sets) * len(self.batch) * (1 - spec.layer / self.model.config.num_hidden_layers)
        others = replaced(self.model, self.specs, masks, tokens_BT, fills) if masks else nullcontext()
        with from_mixer(self.model, spec, self.trace, torch.cat(kept)), others:
            return self._score(self._run(len(sets)))

    def _contribution(self, spec: MixerSpec, heads: Sequence[int], fill: Fill) -> Tensor:
        """(B,T,D) what these heads add, less what takes their place; in fp32 at least."""
        structure, u = structure_of(spec), self.trace.heads[spec.name]
        weight, instead = structure.out_proj(mixer_of(self.model, spec)).weight, baseline(u, self.batch, fill)
        exact = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros_like(self.trace.output[spec.name], dtype=exact)
        for head in heads:
            columns = structure.weight_slices(spec, head).out
            change = u[..., columns].to(exact) - (0 if instead is None else instead[..., columns].to(exact))
            total += change @ weight[:, columns].T.to(exact)
        return total

    def _above(
        self, spec: MixerSpec | None, sets: Sequence[Sequence[HeadId]], fill: Fill
    ) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """The sets' heads in other mixers than `spec`, as `replaced` takes them."""
        masks: dict[str, Tensor] = {}
        for w, heads in enumerate(sets):
            for head in heads:
                if spec is None or head.mixer != spec.name:
                    shape = (len(sets), self.by_name[head.mixer].num_heads)
                    mask = masks.setdefault(
                        head.mixer, torch.zeros(shape, dtype=torch.bool, device=self.batch.input_ids.device)
                    )
                    mask[w, head.head] = True
        return masks, {name: baseline(self.trace.heads[name], self.batch, fill) for name in masks}

    def _without_naively(self, heads: Sequence[HeadId], tokens_BT: Tensor, fill: Fill) -> ChoiceScores:
        """The whole model, with the heads' blocks at the input of `out_proj` replaced."""
        masks, fills = self._above(None, [heads], fill)
        with replaced(self.model, self.specs, masks, tokens_BT, fills):
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
        W, (B, T) = len(variants), self.batch.input_ids.shape
        touched = [h for v in variants for h in (*v.ablate, *(head for head, _ in v.sharpen))]
        lowest = min((self.by_name[h.mixer] for h in touched), key=lambda s: s.layer, default=self.specs[0])
        self.passes += W * B / T * (1 - lowest.layer / self.model.config.num_hidden_layers)
        cache = expand_cache(self.cache, W, lowest.layer)
        states = {
            spec.name: cache.layers[spec.layer].conv_states[0].clone()
            for spec in self.specs
            if spec.is_ssm and spec.layer >= lowest.layer
        }
        below = self.trace.below[lowest.layer][:, -1:].repeat(W, 1, 1)
        mask = None if self.mask is None else self.mask.repeat(W, 1)
        inputs = self._inputs(self.batch.input_ids[:, -1:].repeat(W, 1), mask, past=T - 1)
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


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]
