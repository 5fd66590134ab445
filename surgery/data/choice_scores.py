"""Score choices of several tokens.

The score of a choice is the sum of the log-likelihoods of its tokens, each given the prompt and the earlier tokens. The
prompt runs once. A path is a choice without its last token: choices that differ only in the last token share a path,
and a path that is the beginning of another is part of it (ten first digits for a hundred numbers). Paths are decoded
from copies of the prompt's states, one token at a time.

Shape legend: B prompts, K choices, C tokens of a choice, R paths of all prompts, V vocabulary, W variants folded into a
batch: row w*B + b is prompt b under variant w.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.data.encoding import EncodedBatch
from surgery.models.cache import branched, copied_bytes
from surgery.models.lookup import family_of


@dataclass(frozen=True)
class Paths:
    """Tokens to decode in order to score the choices of each prompt's last question.

    Attributes:
        choices: (B,K,C) tokens of the choices, padded with -1.
        ids: (R,C-1) tokens of the paths, padded with 0.
        real: (R,C-1) True on tokens of a path.
        owner: (R,) index of the prompt of a path.
        of_choice: (B,K) index of the path that starts with a choice without its last token; 0 for choices of one token.
    """

    choices: Tensor
    ids: Tensor
    real: Tensor
    owner: Tensor
    of_choice: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]


def paths_of(batch: EncodedBatch) -> Paths | None:
    """Collect the paths of a batch; None if every choice has one token, so nothing has to be decoded."""
    choices_BKC, _ = batch.last_question()
    C = choices_BKC.shape[-1]
    if C == 1:
        return None
    paths: list[tuple[int, ...]] = []
    owner: list[int] = []
    of_choice = torch.zeros(choices_BKC.shape[:2], dtype=torch.long)
    for b, row in enumerate(choices_BKC.tolist()):
        begun = [tuple(token for token in choice if token >= 0)[:-1] for choice in row]
        longest: list[tuple[int, ...]] = []
        for path in sorted(set(begun) - {()}, key=len, reverse=True):
            if all(longer[: len(path)] != path for longer in longest):
                longest.append(path)
        for k, path in enumerate(begun):
            if path:
                of_choice[b, k] = len(paths) + next(i for i, p in enumerate(longest) if p[: len(path)] == path)
        paths += longest
        owner += [b] * len(longest)
    if not paths:
        return None
    device = choices_BKC.device
    ids = torch.tensor([(*path, *[-1] * (C - 1 - len(path))) for path in paths], device=device)
    return Paths(choices_BKC, ids.clamp(min=0), ids >= 0, torch.tensor(owner).to(device), of_choice.to(device))


def likelihoods(paths: Paths, logits: Sequence[Tensor]) -> Tensor:
    """(W,B,K) log-likelihood of each choice; -inf for missing choices.

    Args:
        logits: (W*B,V) at the query, then (W*R,V) after each token of the paths.
    """
    B, K, C = paths.choices.shape
    rows_BK = torch.arange(B, device=paths.owner.device)[:, None].expand(B, K)

    def log_p(logits: Tensor, rows: int, row_BK: Tensor, token_BK: Tensor) -> Tensor:
        """(W,B,K) log-likelihood of one token of each choice, from (W*rows,V) logits."""
        exact = logits.float() if logits.dtype.itemsize < 4 else logits
        picked_WBK = exact.unflatten(0, (-1, rows))[:, row_BK, token_BK.clamp(min=0)]
        return picked_WBK - exact.logsumexp(-1).unflatten(0, (-1, rows))[:, row_BK]

    total_WBK = log_p(logits[0], B, rows_BK, paths.choices[..., 0])
    for c in range(1, C):
        token_BK = paths.choices[..., c]
        next_WBK = log_p(logits[c], len(paths), paths.of_choice, token_BK)
        total_WBK = total_WBK + next_WBK.masked_fill(token_BK < 0, 0)
    return total_WBK.masked_fill(paths.choices[..., 0] < 0, -math.inf)


def arguments(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, past: int = 0) -> dict[str, Any]:
    """Arguments of a forward pass. Positions count from the first real token.

    Args:
        mask: (rows, past + tokens); None without padding.
        past: number of tokens in the cache.
    """
    family = family_of(model.config)
    if not family.reads_positions:
        # While decoding, a plain Mamba-1 would multiply its one new token by the whole mask.
        reads_keys = getattr(model.config, "splice", None) or not all(s.is_ssm for s in family.mixers(model.config))
        stateless = past > 0 and not reads_keys
        return {"input_ids": input_ids, "attention_mask": None if stateless else mask}
    seen = mask if mask is not None else input_ids.new_ones(len(input_ids), past + input_ids.shape[1])
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, past:]
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}


def completed(cache: Cache, clean: Cache, variants: int, layer: int) -> Cache:
    """Fill in a cache of a pass that skipped modules, with the entries of the clean pass up to `layer`.

    The skipped modules do not run later either, but a model reads the number of past tokens from one of its layers.

    Args:
        cache: its rows repeat those of `clean` for the variants.
        layer: lowest layer that ran, maybe in part.
    """

    def either(partial: Any, clean: Any) -> Any:
        """The entry of the partial pass, or the clean one if its mixer was skipped (fewer keys or a lower count)."""
        if isinstance(clean, dict):
            return {key: either(partial[key], inner) for key, inner in clean.items()}
        if not isinstance(clean, Tensor):
            return max(partial, clean) if isinstance(partial, int) else partial or clean
        if isinstance(partial, Tensor) and partial.shape[1:] == clean.shape[1:]:
            return partial
        return clean.repeat(variants, *[1] * (clean.ndim - 1))

    whole = copy.copy(cache)
    whole.layers = [*clean.layers[:layer], copy.copy(cache.layers[layer]), *cache.layers[layer + 1 :]]
    for name, value in vars(clean.layers[layer]).items():
        setattr(whole.layers[layer], name, either(vars(cache.layers[layer]).get(name), value))
    return whole


@torch.no_grad()
def scored_choices(model: PreTrainedModel, batch: EncodedBatch, paths: Paths, memory: int = 2**29) -> Tensor:
    """(B,K) log-likelihood of each choice of the last questions.

    Args:
        batch: left-padded, ending at the query.
        memory: bytes for the paths that are decoded together.
    """
    T = batch.input_ids.shape[1]
    prompt = arguments(model, batch.input_ids, batch.attention_mask)
    output = model(**prompt, use_cache=True, logits_to_keep=1)
    logits, cache = output.logits[:, -1], output.cache
    steps: list[list[Tensor]] = []
    row = 2 * copied_bytes(cache) // len(batch) + 8 * int(model.config.vocab_size)  # states, what a step makes, logits
    for part in torch.arange(len(paths), device=paths.owner.device).split(max(1, memory // row)):
        branch = branched(cache, paths.owner[part])
        mask = batch.attention_mask[paths.owner[part]]
        after = []
        for c, token in enumerate(paths.ids[part].split(1, dim=1)):
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            after.append(model(**arguments(model, token, mask, T + c), cache=branch, use_cache=True).logits[:, -1])
        steps.append(after)
    return likelihoods(paths, [logits, *(torch.cat(parts) for parts in zip(*steps, strict=True))])[0]
