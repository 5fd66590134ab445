"""The three measurements of every head: ablation, its split by position, and the sharpen test.

Owns: what is run and how it is reused. Must never know: files, selection, statistics. METHOD 2.1-2.3:

- `out_proj` is linear, so ablating a head subtracts `u_h W_h` from the mixer's output; the mixer itself and everything
  below are never run again.
- At the query alone, ablation and the perfect read need one decode step from cached states, all heads in one batch.

Where it takes several tokens to tell a prompt's choices apart, the changed model goes on from its own states to decode
them (`scoring/choices.py`). A head that is removed everywhere is removed there too. Removal at the query, in the
context or at a chosen token, and perfect reads, are of the prompt: at the choices' tokens no head is changed, but all
read the states that the change has left.

Every fast path has a naive one (`naive=True`): the whole model, once for each head, with the head changed in place.
Shape legend: B prompts, T tokens, W variants, L layers, H heads, P head width, R paths of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.data.encoding import EncodedBatch
from surgery.interventions.ablation import Removal, baseline, replaced, tokens_of
from surgery.interventions.hooks import Trace, from_block, from_mixer, only_logits, record
from surgery.interventions.oracle_read import PerfectRead, intervene, mixed_at_query, values_at
from surgery.models.cache import expand_cache
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.sizes import own_kv_bytes_per_token, state_bytes
from surgery.scoring.choices import Paths, arguments, branched, completed, likelihoods, paths_of, row_bytes, snapshot
from surgery.scoring.ranking import ChoiceScores, check_logits, choice_scores, compared
from surgery.types import Fill, HeadId, MixerSpec, Reads

READS: tuple[Reads, ...] = ("segment_end", "answer_token")


@dataclass(frozen=True)
class Variant:
    """One changed model: heads ablated at the query, heads that read perfectly and what they read."""

    ablate: tuple[HeadId, ...] = ()
    sharpen: tuple[tuple[HeadId, Reads], ...] = ()


@dataclass(frozen=True)
class Part:
    """Tokens that run in one pass: the prompts, their query alone, or the next token of every path.

    Attributes:
        batch: `input_ids` and `attention_mask` of these tokens.
        mask: (rows, past + tokens); None without padding.
        past: tokens before them.
        trace: of the clean model; it may hold tokens before these.
        cache: the clean model's keys and values behind these tokens, where there are paths.
    """

    batch: EncodedBatch
    mask: Tensor | None
    past: int
    trace: Trace
    cache: Cache | None

    def below(self, layer: int, variants: int) -> Tensor:
        """(W*rows,tokens,D) the clean stream that the block of `layer` takes."""
        return self.trace.below[layer][:, -self.batch.input_ids.shape[1] :].repeat(variants, 1, 1)


class Sweep:
    """One batch of prompts, and everything about the clean model on it that the measurements share.

    Args:
        batch: left-padded prompts that end at the query (`encode(..., padding_side="left", until_answer=True)`).
        memory: bytes that the states or the residual streams of one folded pass may take; 512 MiB on a GPU. On a CPU
            32 MiB, within its caches, took half the time of 512. The clean pass of the batch comes on top: all layers'
            streams, about 4 * (D + 5 I) bytes a token and layer.
        stepwise: the clean model takes the query as a decode step behind the other tokens. That is half the work where
            only `at_query` is asked for; `without` gives the same but for rounding.

    Attributes:
        passes: what was run so far, in full forward passes of one prompt.
    """

    def __init__(
        self, model: PreTrainedModel, batch: EncodedBatch, memory: int | None = None, stepwise: bool = False
    ) -> None:
        self.model, self.batch = model, batch
        self.memory = memory or (2**29 if model.device.type == "cuda" else 2**25)
        self.passes = 0.0
        family = family_of(model.config)
        self.specs: tuple[MixerSpec, ...] = family.mixers(model.config)
        self.by_name = {spec.name: spec for spec in self.specs}
        self.cache_argument = family.cache_argument
        self.mask = None if bool(batch.attention_mask.all()) else batch.attention_mask
        self.tokens, self.narrow = _narrowed(batch)
        self.paths: Paths | None = paths_of(batch)
        with torch.no_grad():
            self.clean: ChoiceScores = self._run_clean(stepwise)
        self.trace: Trace = self.prompt.trace
        self._values: dict[tuple[str, Reads], Tensor] = {}

    def _run_clean(self, stepwise: bool) -> ChoiceScores:
        """The clean model on the prompts and on the paths, and what it did there."""
        T, mask, paths = self.batch.input_ids.shape[1], self.mask, self.paths
        query = replace(
            self.batch, input_ids=self.batch.input_ids[:, -1:], attention_mask=self.batch.attention_mask[:, -1:]
        )
        whole = Part(self.batch, mask, 0, Trace(), None)
        self.query = replace(whole, batch=query, past=T - 1)
        if stepwise:
            with record(self.model, self.specs) as before:
                self.cache = self._behind_query()
            self.query, logits = self._recorded(self.query, expand_cache(self.cache, 1))
            self.prompt = replace(whole, trace=before.followed_by(self.query.trace), cache=self.query.cache)
        else:
            self.prompt, logits = self._recorded(whole)
            self.query = replace(self.query, trace=self.prompt.trace, cache=self.prompt.cache)
            self.cache = self._behind_query()
        check_logits(self.model, logits)
        self.passes += len(self.batch) * (1.0 if stepwise else 2.0) + self._path_passes()
        self.steps: list[Part] = []
        found = [logits]
        if paths is None or self.prompt.cache is None:
            return self._score(found)[0]
        cache = branched(self.prompt.cache, paths.owner)
        mask = None if mask is None else mask[paths.owner]
        for c in range(paths.ids.shape[1]):
            token, real = paths.ids[:, c : c + 1], paths.real[:, c : c + 1].long()
            mask = None if mask is None else torch.cat([mask, torch.ones_like(real)], 1)
            tokens = replace(self.batch, input_ids=token, attention_mask=real)
            part, logits = self._recorded(Part(tokens, mask, T + c, Trace(), None), cache)
            self.steps.append(part)
            found.append(logits)
        return self._score(found)[0]

    def _behind_query(self) -> Cache:
        """The clean model's states and keys where the query comes next."""
        mask = None if self.mask is None else self.mask[:, :-1]
        inputs = arguments(self.model, self.batch.input_ids[:, :-1], mask)
        cache: Cache = getattr(self.model(**inputs, use_cache=True, logits_to_keep=1), self.cache_argument)
        return cache

    def _recorded(self, part: Part, cache: Cache | None = None) -> tuple[Part, Tensor]:
        """The part with what the clean model did there, and its logits. `cache` goes on."""
        with record(self.model, self.specs) as trace:
            logits, cache = self._run(part, 1, cache)
        return replace(part, trace=trace, cache=None if cache is None else snapshot(cache)), logits

    def _run(self, part: Part, variants: int, cache: Cache | None = None, naive: bool = False) -> tuple[Tensor, Any]:
        """Logits at the last token of a part, repeated for the variants, and the cache where one is needed.

        (W*rows,U), of the tokens that are some prompt's choices; (W*rows,V) if `naive`, or if there are paths.
        """
        mask = None if part.mask is None else part.mask.repeat(variants, 1)
        inputs = arguments(self.model, part.batch.input_ids.repeat(variants, 1), mask, part.past)
        if cache is not None:
            inputs[self.cache_argument] = cache
        keep = cache is not None or self.paths is not None
        with nullcontext() if naive or self.paths is not None else only_logits(self.model, self.tokens):
            output = self.model(**inputs, use_cache=keep, logits_to_keep=1)
        return output.logits[:, -1], getattr(output, self.cache_argument) if keep else None

    def _run_all(
        self,
        first: Part,
        variants: int,
        changed: Callable[[Part], AbstractContextManager[None]],
        cache: Cache | None = None,
        lowest: int = 0,
        naive: bool = False,
    ) -> list[ChoiceScores]:
        """A part that ends at the query and then the paths, each in its change; the scores by variant.

        Args:
            lowest: layer of the first block that runs.
        """
        with changed(first):
            found, cache = self._run(first, variants, cache, naive)
        logits = [found]
        if self.paths is not None:
            begin = torch.arange(variants, device=found.device)[:, None] * len(self.batch)
            cache = completed(cache, first.cache, variants, lowest)
            cache = branched(cache, (begin + self.paths.owner).flatten(), lowest)
        for part in self.steps:
            with changed(part):
                found, cache = self._run(part, variants, cache, naive)
            cache = completed(cache, part.cache, variants, lowest)
            logits.append(found)
        return self._score(logits, naive)

    def _score(self, logits: list[Tensor], naive: bool = False) -> list[ChoiceScores]:
        """By variant."""
        if self.paths is None:
            batch = self.batch if naive else self.narrow
            return [choice_scores(x, batch) for x in logits[0].split(len(batch))]
        _, gold_B = self.batch.last_question()
        return [compared(scores_BK, gold_B) for scores_BK in likelihoods(self.paths, logits)]

    def _path_passes(self) -> float:
        """Of one variant, in full forward passes."""
        return 0.0 if self.paths is None else self.paths.ids.numel() / self.batch.input_ids.shape[1]

    def _path_bytes(self) -> int:
        """Of one prompt: the states at its end, and its paths."""
        if self.paths is None:
            return 0
        tokens = self.batch.input_ids.shape[1] + self.paths.ids.shape[1]
        return self._cache_bytes() + row_bytes(self.model, tokens) * -(-len(self.paths) // len(self.batch))

    @torch.no_grad()
    def without(
        self, sets: Sequence[Sequence[HeadId]], removal: Removal | None = None, naive: bool = False
    ) -> list[ChoiceScores]:
        """The model without each set of heads: single heads, whole layers, or heads of several layers together.

        Only the blocks above a set's lowest mixer are run. Removing one head there subtracts its contribution from
        what the clean mixer put out; other mixers of the set are changed while they run.
        """
        removal = removal or Removal()
        if naive:
            return [score for heads in sets for score in self._without_naively(heads, removal)]
        place = {spec.name: i for i, spec in enumerate(self.specs)}
        lowest = [min(place[head.mixer] for head in heads) for heads in sets]
        found: dict[int, ChoiceScores] = {}
        for index, spec in enumerate(self.specs):
            mine = [i for i, low in enumerate(lowest) if low == index]
            # Of one prompt: a block's streams are several times wider.
            row = 64 * self.trace.output[spec.name][0].numel() + self._path_bytes()
            for group in _chunks(mine, max(1, self.memory // (row * len(self.batch)))):
                scores = self._without_from(spec, [sets[i] for i in group], removal)
                found |= dict(zip(group, scores, strict=True))
        return [found[i] for i in range(len(sets))]

    def _without_from(self, spec: MixerSpec, sets: Sequence[Sequence[HeadId]], removal: Removal) -> list[ChoiceScores]:
        """Sets whose lowest mixer is `spec`, in one pass."""

        @contextmanager
        def changed(part: Part) -> Iterator[None]:
            tokens = self._tokens(part, removal)[..., None]
            output = part.trace.output[spec.name]
            own = ([h.head for h in heads if h.mixer == spec.name] for heads in sets)
            lost = (self._contribution(part, spec, heads, removal.fill) for heads in own)
            kept = [torch.where(tokens, output - x, output).to(output.dtype) for x in lost]
            with (
                from_mixer(self.model, spec, part.trace, torch.cat(kept)),
                self._others_removed(part, spec, sets, removal),
            ):
                yield

        share = 1 - spec.layer / self.model.config.num_hidden_layers
        self.passes += len(sets) * (len(self.batch) + self._path_passes()) * share
        return self._run_all(self.prompt, len(sets), changed, lowest=spec.layer)

    def _tokens(self, part: Part, removal: Removal) -> Tensor:
        """(rows,tokens) bool: where heads are removed."""
        if part is self.prompt:
            return tokens_of(self.batch, removal.where)
        return torch.full_like(part.batch.input_ids, removal.where == "everywhere", dtype=torch.bool)

    def _contribution(self, part: Part, spec: MixerSpec, heads: Sequence[int], fill: Fill) -> Tensor:
        """(rows,tokens,D) what these heads add, less what takes their place; in fp32 at least."""
        structure, u = structure_of(spec), part.trace.heads[spec.name]
        weight, instead = structure.out_proj(mixer_of(self.model, spec)).weight, baseline(u, part.batch, fill)
        exact = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros_like(part.trace.output[spec.name], dtype=exact)
        for head in heads:
            columns = structure.weight_slices(spec, head).out
            change = u[..., columns].to(exact) - (0 if instead is None else instead[..., columns].to(exact))
            total += change @ weight[:, columns].T.to(exact)
        return total

    def _others_removed(
        self, part: Part, spec: MixerSpec | None, sets: Sequence[Sequence[HeadId]], removal: Removal
    ) -> AbstractContextManager[None]:
        """Removes the sets' heads in other mixers than `spec`."""
        masks: dict[str, Tensor] = {}
        for w, heads in enumerate(sets):
            for head in heads:
                if spec is None or head.mixer != spec.name:
                    shape = (len(sets), self.by_name[head.mixer].num_heads)
                    mask = masks.setdefault(
                        head.mixer, torch.zeros(shape, dtype=torch.bool, device=self.batch.input_ids.device)
                    )
                    mask[w, head.head] = True
        if not masks:
            return nullcontext()
        fills = {name: baseline(part.trace.heads[name], part.batch, removal.fill) for name in masks}
        return replaced(self.model, self.specs, masks, self._tokens(part, removal), fills)

    def _without_naively(self, heads: Sequence[HeadId], removal: Removal) -> list[ChoiceScores]:
        """The whole model, with the heads' blocks at the input of `out_proj` replaced."""
        return self._run_all(
            self.prompt, 1, lambda part: self._others_removed(part, None, [heads], removal), naive=True
        )

    @torch.no_grad()
    def at_query(self, variants: Sequence[Variant], naive: bool = False) -> list[ChoiceScores]:
        """The model with each variant's heads changed at the query token alone."""
        row = 4 * self._cache_bytes() + self._path_bytes()  # a copy of the states, and what one step makes of them
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
        self.passes += W * (B / T + self._path_passes()) * (1 - lowest.layer / self.model.config.num_hidden_layers)
        cache = expand_cache(self.cache, W, lowest.layer)
        states = {
            spec.name: cache.layers[spec.layer].conv_states[0].clone()
            for spec in self.specs
            if spec.is_ssm and spec.layer >= lowest.layer
        }
        masks = self._masks(variants)

        @contextmanager
        def changed(part: Part) -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(from_block(self.model, lowest, part.trace, part.below(lowest.layer, W)))
                if part is self.query:
                    stack.enter_context(intervene(self.model, self.specs, *masks, conv_states=states))
                yield

        return self._run_all(self.query, W, changed, cache, lowest.layer)

    def _run_naively(self, variant: Variant) -> list[ChoiceScores]:
        """The whole prompt through all blocks, changed at its end."""
        masks = self._masks([variant])

        def changed(part: Part) -> AbstractContextManager[None]:
            return intervene(self.model, self.specs, *masks) if part is self.prompt else nullcontext()

        return self._run_all(self.prompt, 1, changed, naive=True)

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
