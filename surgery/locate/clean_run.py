"""Run the clean model on a batch of prompts once, and keep what changed runs reuse.

Shape legend: B prompts, T tokens, W variants, U tokens that are choices, D model width, I inner width of a mixer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.data.choice_scores import Paths, arguments, likelihoods, paths_of
from surgery.data.encoding import EncodedBatch
from surgery.data.ranking import ChoiceScores, check_logits, choice_scores, compared
from surgery.models.cache import branched, copied_bytes, snapshot
from surgery.models.hooks import ActivationCache, only_logits, record, record_projected
from surgery.models.lookup import family_of
from surgery.types import READS, MixerSpec


@dataclass(frozen=True)
class CleanPass:
    """Pass of the clean model over some tokens: the whole prompts, their query alone, or the next token of every path.

    Attributes:
        batch: `input_ids` and `attention_mask` of these tokens.
        mask: (rows, past + tokens); None without padding.
        past: number of tokens before these.
        activations: may include tokens before these. If they hold not all tokens of the prompt, `activations.tokens`
            lists them.
        cache: keys and values after these tokens, if there are paths.
        owner: the prompt of each row, if the rows are paths.
    """

    batch: EncodedBatch
    mask: Tensor | None
    past: int
    activations: ActivationCache
    cache: Cache | None
    owner: Tensor | None = None

    def residual(self, layer: int, variants: int) -> Tensor:
        """(W*rows,tokens,D) input of the block of `layer` in the clean model."""
        return self.activations.residual[layer][:, -self.batch.input_ids.shape[1] :].repeat(variants, 1, 1)


@dataclass
class CleanRun:
    """Run of the clean model on one batch of prompts. All changed runs reuse it.

    Attributes:
        specs: mixers of the model.
        prompt: all tokens of the prompts.
        query: their last token alone.
        steps: the tokens of the paths, one pass each.
        paths: tokens to decode to score choices of several tokens; None if every choice has one token.
        before_query: states and keys before the query.
        narrowed: the tokens that are choices of some prompt, and the batch with choices that index them; None and the
            batch itself if the logits of the whole vocabulary are needed.
        scores: of the clean model.
        passes: work so far, in full forward passes of one prompt.
    """

    model: PreTrainedModel
    specs: tuple[MixerSpec, ...]
    prompt: CleanPass
    query: CleanPass
    steps: list[CleanPass]
    paths: Paths | None
    before_query: Cache
    narrowed: tuple[Tensor | None, EncodedBatch]
    scores: ChoiceScores
    passes: float

    @property
    def batch(self) -> EncodedBatch:
        """The prompts."""
        return self.prompt.batch

    @property
    def path_passes(self) -> float:
        """Work to decode the paths of all prompts, in full forward passes of one prompt."""
        return 0.0 if self.paths is None else self.paths.ids.numel() / self.batch.input_ids.shape[1]

    @property
    def path_bytes(self) -> int:
        """Bytes to decode the paths of one prompt: the states at its end, and those of the paths."""
        if self.paths is None:
            return 0
        states = copied_bytes(self.before_query) // len(self.batch)
        row = 2 * states + 8 * int(self.model.config.vocab_size)
        return states + row * -(-len(self.paths) // len(self.batch))


@torch.no_grad()
def run_clean(model: PreTrainedModel, batch: EncodedBatch, stepwise: bool = False) -> CleanRun:
    """Run the clean model on a batch, and record the activations and caches that changed runs need.

    The activations take about 4 * (D + 5 I) bytes per token and layer, with I the inner width of a mixer.

    Args:
        batch: left-padded prompts that end at the query (`encode(..., padding_side="left", until_answer=True)`).
        stepwise: run the query as a decode step after the other tokens, for `change_at_query` alone. This halves the
            work, and holds the activations of the query and of the gold tokens alone.

    Raises:
        ModelError: a logit is NaN or infinite, or a hook never fired.
    """
    family, T, paths = family_of(model.config), batch.input_ids.shape[1], paths_of(batch)
    specs = family.mixers(model.config)
    mask = None if bool(batch.attention_mask.all()) else batch.attention_mask
    tokens, narrowed = None, batch
    if paths is None:
        tokens, places = batch.choice_ids.clamp(min=0).unique(return_inverse=True)
        narrowed = replace(batch, choice_ids=places.where(batch.choice_ids >= 0, -1))
    last = replace(batch, input_ids=batch.input_ids[:, -1:], attention_mask=batch.attention_mask[:, -1:])
    prompt = CleanPass(batch, mask, 0, ActivationCache(), None)
    query = CleanPass(last, mask, T - 1, ActivationCache(), None)

    def run_recorded(part: CleanPass, cache: Cache | None = None) -> tuple[CleanPass, Tensor]:
        with record(model, specs) as activations:
            logits, cache = run_pass(model, part, 1, cache, tokens, cache is not None or paths is not None)
        return replace(part, activations=activations, cache=None if cache is None else snapshot(cache)), logits

    def run_before_query() -> Cache:
        inputs = arguments(model, batch.input_ids[:, :-1], None if mask is None else mask[:, :-1])
        cache: Cache = model(**inputs, use_cache=True, logits_to_keep=1).cache
        return cache

    if stepwise:
        with record_projected(model, specs, read_tokens(batch, specs)) as before:
            before_query = run_before_query()
        query, logits = run_recorded(query, branched(before_query, torch.arange(len(batch), device=model.device)))
        prompt = replace(prompt, activations=query.activations.after(before, T - 1), cache=query.cache)
    else:
        prompt, logits = run_recorded(prompt)
        query = replace(query, activations=prompt.activations, cache=prompt.cache)
        before_query = run_before_query()
    check_logits(model, logits)
    steps, all_logits = [], [logits]
    if paths is not None and prompt.cache is not None:
        cache = branched(prompt.cache, paths.owner)
        step_mask = None if mask is None else mask[paths.owner]
        for c in range(paths.ids.shape[1]):
            token, real = paths.ids[:, c : c + 1], paths.real[:, c : c + 1].long()
            step_mask = None if step_mask is None else torch.cat([step_mask, torch.ones_like(real)], 1)
            next_token = replace(batch, input_ids=token, attention_mask=real)
            part = CleanPass(next_token, step_mask, T + c, ActivationCache(), None, paths.owner)
            step, logits = run_recorded(part, cache)
            steps.append(step)
            all_logits.append(logits)
    scores = scores_by_variant(all_logits, narrowed, paths)[0]
    run = CleanRun(model, specs, prompt, query, steps, paths, before_query, (tokens, narrowed), scores, 0.0)
    run.passes = len(batch) * (1.0 if stepwise else 2.0) + run.path_passes
    return run


def read_tokens(batch: EncodedBatch, specs: Sequence[MixerSpec]) -> Tensor:
    """(B,M) tokens before the query whose streams oracle reads need: what a convolution sees at the gold tokens and at
    the query, whose own are the last.
    """
    T, width = batch.input_ids.shape[1], max(1, *(spec.conv_kernel for spec in specs))
    back = torch.arange(width, device=batch.input_ids.device).flip(0)
    places = [batch.last_read(position)[:, None] - back for position in READS]
    last = (T - 1 - back[:-1]).expand(len(batch), -1)
    return torch.cat([*places, last], 1).clamp(0, T - 2)


def run_pass(
    model: PreTrainedModel,
    part: CleanPass,
    variants: int,
    cache: Cache | None,
    tokens: Tensor | None,
    use_cache: bool,
) -> tuple[Tensor, Any]:
    """Run the tokens of a pass, repeated for each variant.

    Args:
        tokens: (U,) compute the logits of these tokens only; of the whole vocabulary if None.

    Returns:
        (W*rows,U) or (W*rows,V) logits at the last token, and the cache; None without `use_cache`.
    """
    mask = None if part.mask is None else part.mask.repeat(variants, 1)
    inputs = arguments(model, part.batch.input_ids.repeat(variants, 1), mask, part.past)
    if cache is not None:
        inputs["cache"] = cache
    with nullcontext() if tokens is None else only_logits(model, tokens):
        output = model(**inputs, use_cache=use_cache, logits_to_keep=1)
    return output.logits[:, -1], output.cache if use_cache else None


def scores_by_variant(logits: list[Tensor], batch: EncodedBatch, paths: Paths | None) -> list[ChoiceScores]:
    """Compare each prompt's choices in every variant. `logits`: at the query, then at each token of the paths."""
    if paths is None:
        return [choice_scores(x, batch) for x in logits[0].split(len(batch))]
    _, gold_B = batch.last_question()
    return [compared(scores_BK, gold_B) for scores_BK in likelihoods(paths, logits)]
