"""Choices of several tokens by hand, and what scores them without any shortcut: a whole pass for each choice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from random import Random

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch
from tests.support.pico import pico_tokenizer, prompts

# What changes the model while prompt `b`, of so many tokens, runs with its choices behind it.
Change = Callable[[int, int], AbstractContextManager[None]]


def long_prompts(most: int = 3, lengths: tuple[int, ...] = (9, 14, 12, 7), choices: int = 6) -> EncodedBatch:
    """Left-padded prompts whose choices have 1 to `most` tokens; none begins another.

    One prompt's have one token each, and one prompt has fewer of them.
    """
    rng, batch = Random(most), prompts(lengths, choices)
    tokens_BKC = torch.full((len(lengths), choices, most), -1)
    for b in range(len(lengths)):
        drawn: list[list[int]] = []
        while len(drawn) < choices - (b == 2):
            new = [
                rng.randint(3, 6) if b != 1 else 20 + len(drawn) for _ in range(rng.randint(1, most) if b != 1 else 1)
            ]
            if all(new[: len(old)] != old and old[: len(new)] != new for old in drawn):
                drawn.append(new)
        for k, choice in enumerate(drawn):
            tokens_BKC[b, k, : len(choice)] = torch.tensor(choice)
    gold = batch.gold % (choices - 1)
    target = tokens_BKC[..., 0].gather(1, gold)
    tokens = tokens_BKC[:, None]
    return replace(batch, choice_ids=tokens[..., 0], choice_rest=tokens[..., 1:], gold=gold, target=target)


@cache
def digit_tokenizer() -> PreTrainedTokenizerFast:
    """The pico models' tokenizer, but that every digit is a token."""
    tokenizer = Tokenizer.from_str(pico_tokenizer().backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pico_tokenizer().pad_token)


def unpadded(batch: EncodedBatch, b: int) -> Tensor:
    """(T,) the tokens of one prompt."""
    return batch.input_ids[b][batch.attention_mask[b].bool()]


@torch.no_grad()
def whole_passes(model: PreTrainedModel, batch: EncodedBatch, change: Change | None = None) -> Tensor:
    """(B,K) log-likelihoods: each prompt alone, unpadded, each choice behind it in a row of its own; no cache."""
    found = torch.full(batch.choice_ids[:, 0].shape, -torch.inf)
    for b in range(len(batch)):
        prompt = unpadded(batch, b)
        choices_KC = batch.choice_tokens[b, int((batch.gold[b] >= 0).sum()) - 1]
        rows_KT = torch.cat([prompt.expand(len(choices_KC), -1), choices_KC.clamp(min=0)], 1)
        with change(b, len(prompt)) if change else nullcontext():
            logits = model(rows_KT, use_cache=False).logits
        for k, choice in enumerate(choices_KC):
            log_p = logits[k, len(prompt) - 1 : -1].log_softmax(-1)
            if choice[0] >= 0:
                found[b, k] = sum(log_p[c, token] for c, token in enumerate(choice) if token >= 0)
    return found


def margins(scores_BK: Tensor, batch: EncodedBatch) -> Tensor:
    """(B,) the gold choice's score less the best other's."""
    found = []
    for scores, gold in zip(scores_BK.tolist(), batch.gold[:, -1].tolist(), strict=True):
        found.append(scores[gold] - max(s for k, s in enumerate(scores) if k != gold))
    return torch.tensor(found)
