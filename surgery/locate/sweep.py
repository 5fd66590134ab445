"""The three measurements of every head: ablation, its split by position, and the sharpen test.

Owns: what is run and how it is reused. Must never know: files, selection, statistics. METHOD 2.1-2.3:

- `out_proj` is linear, so ablating a head subtracts `scale * u_h W_h` from the residual stream above the mixer; the
  mixer itself and everything below are never run again.
- At the query alone, ablation and the perfect read need one decode step from cached states, all heads in one batch.

Every fast path has a naive one (`naive=True`): the whole model, once for each head, with the head changed in place.
Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.capture import PerfectRead, Trace, expand_cache, intervene, record
from surgery.evaluate.scoring import ChoiceScores, choice_scores
from surgery.families import Family
from surgery.heads import HeadId, MixerSpec, Reads
from surgery.probes.documents import EncodedBatch
from surgery.sizes import state_bytes

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

    def __init__(self, model: PreTrainedModel, family: Family, batch: EncodedBatch, memory: int = 2**29) -> None:
        self.model, self.family, self.batch, self.memory = model, family, batch, memory
        self.specs: tuple[MixerSpec, ...] = family.mixers(model.config)
        self.mask = None if bool(batch.attention_mask.all()) else batch.attention_mask
        with torch.no_grad(), record(model, family, [s.layer for s in self.specs]) as trace:
            output = model(batch.input_ids, attention_mask=self.mask, use_cache=False, logits_to_keep=1)
            self.trace: Trace = trace
            self.clean: ChoiceScores = choice_scores(output.logits[:, -1], batch)
        with torch.no_grad():
            prefix = None if self.mask is None else self.mask[:, :-1]
            self.cache = model(batch.input_ids[:, :-1], attention_mask=prefix, use_cache=True).cache_params
        self._values: dict[tuple[int, Reads], Tensor] = {}

    @torch.no_grad()
    def ablated(self, spec: MixerSpec, context_only: bool = False, naive: bool = False) -> list[ChoiceScores]:
        """Every head of one layer removed in turn, at all tokens or at all but the query."""
        heads = range(spec.num_heads)
        if naive:
            return [self._ablated_naively(spec, head, context_only) for head in heads]
        out_proj = self.family.out_proj(self.family.mixer(self.model, spec.layer))
        scale = self.family.residual_scale(self.model.config)
        residual, u = self.trace.residual[spec.layer], self.trace.heads[spec.layer]
        found = []
        row = 64 * residual[0].numel()  # what a block needs for one prompt: its streams are several times wider
        for group in _chunks(list(heads), max(1, self.memory // (row * len(self.batch)))):
            hidden = []
            for head in group:
                columns = self.family.weight_slices(spec, head).out
                contribution = (u[..., columns] @ out_proj.weight[:, columns].T).to(residual.dtype) * scale
                if context_only:
                    contribution = torch.cat([contribution[:, :-1], torch.zeros_like(contribution[:, -1:])], 1)
                hidden.append(residual - contribution)
            mask = None if self.mask is None else self.mask.repeat(len(group), 1)
            logits = self.family.resume(self.model, spec.layer, torch.cat(hidden), mask, keep_last=True)
            found += [choice_scores(x, self.batch) for x in logits[:, -1].chunk(len(group))]
        return found

    def _ablated_naively(self, spec: MixerSpec, head: int, context_only: bool) -> ChoiceScores:
        """The head's columns of `out_proj` are zeroed, at all tokens or at all but the last."""
        out_proj = self.family.out_proj(self.family.mixer(self.model, spec.layer))
        columns = self.family.weight_slices(spec, head).out

        def zero(_: torch.nn.Module, args: tuple) -> tuple:
            u = args[0].clone()
            u[:, : u.shape[1] - int(context_only), columns] = 0
            return (u,)

        handle = out_proj.register_forward_pre_hook(zero)
        try:
            output = self.model(self.batch.input_ids, attention_mask=self.mask, use_cache=False, logits_to_keep=1)
        finally:
            handle.remove()
        return choice_scores(output.logits[:, -1], self.batch)

    @torch.no_grad()
    def at_query(self, variants: Sequence[Variant], naive: bool = False) -> list[ChoiceScores]:
        """The model with each variant's heads changed at the query token alone."""
        row = 4 * state_bytes(self.model.config)  # a copy of the states, and what one step makes of them
        at_once = 1 if naive else max(1, self.memory // (row * len(self.batch)))
        found: list[ChoiceScores] = []
        for group in _chunks(list(variants), at_once):
            found += self._run_naively(group[0]) if naive else self._decode(group)
        return found

    def _decode(self, variants: Sequence[Variant]) -> list[ChoiceScores]:
        """One decode step from the cached states, variants folded into the batch."""
        W = len(variants)
        cache = expand_cache(self.cache, W)
        states = {s.layer: cache.layers[s.layer].conv_states[0].clone() for s in self.specs}
        ids = self.batch.input_ids[:, -1:].repeat(W, 1)
        mask = None if self.mask is None else self.mask.repeat(W, 1)
        with intervene(self.model, self.family, *self._masks(variants), conv_states=states):
            logits = self.model(ids, cache_params=cache, use_cache=True, attention_mask=mask).logits[:, -1]
        return [choice_scores(x, self.batch) for x in logits.chunk(W)]

    def _run_naively(self, variant: Variant) -> list[ChoiceScores]:
        with intervene(self.model, self.family, *self._masks([variant])):
            output = self.model(self.batch.input_ids, attention_mask=self.mask, use_cache=False, logits_to_keep=1)
        return [choice_scores(output.logits[:, -1], self.batch)]

    def _masks(self, variants: Sequence[Variant]) -> tuple[dict[int, Tensor], dict[int, PerfectRead]]:
        """The variants by layer, as `intervene` takes them."""
        W, device = len(variants), self.batch.input_ids.device
        ablate: dict[int, Tensor] = {}
        sharpen: dict[int, PerfectRead] = {}
        for spec in self.specs:
            off = torch.zeros(W, spec.num_heads, dtype=torch.bool, device=device)
            read = torch.zeros_like(off)
            value = torch.zeros(W, len(self.batch), spec.num_heads, spec.head_dim, device=device)
            for w, variant in enumerate(variants):
                for head in variant.ablate:
                    if head.layer == spec.layer:
                        off[w, head.head] = True
                for head, column in variant.sharpen:
                    if head.layer == spec.layer:
                        read[w, head.head] = True
                        value[w, :, head.head] = self.perfect_values(spec, column)[:, head.head]
            if bool(off.any()):
                ablate[spec.layer] = off
            if bool(read.any()):
                sharpen[spec.layer] = PerfectRead(read, value)
        return ablate, sharpen

    def perfect_values(self, spec: MixerSpec, reads: Reads) -> Tensor:
        """(B,H,P) what each head would mix in if it read the gold token alone, scaled to its usual output.

        The usual output is the root mean square, over the prompts, of the norm of what the head mixes in at the query.
        """
        key = (spec.layer, reads)
        if key not in self._values:
            mixer = self.family.mixer(self.model, spec.layer)
            streams = self.family.streams(mixer, self.trace.projected[spec.layer])
            gold = getattr(self.batch, reads)[:, -1]
            x_BHP = streams.x[torch.arange(len(self.batch)), gold]
            scan = self.trace.scan[spec.layer][:, -1].view(x_BHP.shape)
            mixed_BHP = scan - mixer.D[:, None] * streams.x[:, -1]
            usual_H = mixed_BHP.pow(2).sum(-1).mean(0).sqrt()
            unit = x_BHP / x_BHP.norm(dim=-1, keepdim=True).clamp(min=1e-9)
            self._values[key] = unit * usual_H[:, None]
        return self._values[key]


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]
