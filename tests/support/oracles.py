"""Slow, independent versions of what the package computes, for tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.generation import GeneratedAnswers, is_match
from surgery.data.ranking import ChoiceScores, answer_choices
from surgery.locate.ablation import Ablation
from surgery.locate.ablation_sweep import Variant, ablated_while_running, changes_by_mixer, run_changed
from surgery.locate.clean_run import CleanPass, CleanRun
from surgery.models.oracle_read import intervene
from surgery.probes.documents import Document, answer_list, expected_answers, max_answer_tokens
from surgery.train.divergence import Kind
from surgery.types import HeadId


def assert_same(fast: Sequence[ChoiceScores], naive: Sequence[ChoiceScores]) -> None:
    assert len(fast) == len(naive) > 0
    for one, other in zip(fast, naive, strict=True):
        torch.testing.assert_close(one.margin, other.margin, atol=1e-4, rtol=0)
        assert torch.equal(one.correct, other.correct)


@torch.no_grad()
def naive_generate_greedy(
    model: PreTrainedModel, prompts: EncodedBatch, max_tokens: int, end: int | None = None
) -> Tensor:
    """`generate_greedy` with a whole pass over an unpadded row for every token, without a cache."""
    rows = []
    for ids_T, mask_T in zip(prompts.input_ids, prompts.attention_mask, strict=True):
        row, ended = ids_T[mask_T.bool()][None], False
        for _ in range(max_tokens):
            token = model(row, use_cache=False).logits[:, -1:].argmax(-1)
            token = torch.full_like(token, end) if ended and end is not None else token
            ended = ended or token.item() == end
            row = torch.cat([row, token], 1)
        rows.append(row[0, -max_tokens:])
    return torch.stack(rows)


def naive_generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> GeneratedAnswers:
    """`generate_answers` that generates every text and ranks choices in a pass of its own.

    Returns:
        `correct`, `begun` and `ranked`; `token_accuracy` is empty.
    """
    matches = []
    for document in documents:
        first = len(document.questions) - len(answer_list(document))
        cut = Document(document.task, document.text, document.questions[: first + 1])
        prompt = encode([cut], tokenizer, padding_side="left", until_answer=True)
        ids = naive_generate_greedy(model, prompt, max_answer_tokens(document), tokenizer.eos_token_id)
        text = str(tokenizer.decode(ids[0], skip_special_tokens=True))
        answers, bounded = expected_answers(document)
        matches.append((is_match(text, answers, bounded), is_match(text, answers, bounded=False)))
    correct, begun = torch.tensor(matches).unbind(1)
    choices = bool(documents[0].questions[-1].choices)
    ranked = answer_choices(model, tokenizer, documents, len(documents)) if choices else None
    return GeneratedAnswers(correct, begun, torch.empty(0), ranked)


@torch.no_grad()
def naive_ablate(
    run: CleanRun, sets: Sequence[Sequence[HeadId]], ablation: Ablation | None = None
) -> list[ChoiceScores]:
    """Run the whole model without each set of heads, replaced at the input of `out_proj`; logits of all tokens."""
    whole, scores = replace(run, narrowed=(None, run.batch)), []
    for heads in sets:

        def change(part: CleanPass, heads: Sequence[HeadId] = heads) -> AbstractContextManager[None]:
            return ablated_while_running(whole, part, [heads], ablation or Ablation())

        scores += run_changed(whole, run.prompt, 1, change)
    return scores


@torch.no_grad()
def naive_change_at_query(
    run: CleanRun, variants: Sequence[Variant], fills: Mapping[str, Tensor] | None = None
) -> list[ChoiceScores]:
    """Run the whole prompt through all blocks, changed at its end, for each variant; logits of all tokens."""
    whole, scores = replace(run, narrowed=(None, run.batch)), []
    for variant in variants:
        changes = changes_by_mixer(whole, [variant])

        def change(part: CleanPass, changes: tuple = changes) -> AbstractContextManager[None]:
            is_prompt = part is run.prompt
            return intervene(run.model, run.specs, *changes, fills=fills) if is_prompt else nullcontext()

        scores += run_changed(whole, run.prompt, 1, change)
    return scores


def naive_divergence(student_MC: Tensor, teacher_MC: Tensor, kind: Kind, temperature: float = 1.0) -> Tensor:
    """(M,) divergences of `surgery.train.divergence` as their formulas are written, for autograd."""
    q, p = F.log_softmax(student_MC / temperature, -1), F.log_softmax(teacher_MC / temperature, -1)
    m = torch.logaddexp(p, q) - math.log(2)
    divergences = {
        "forward": (p.exp() * (p - q)).sum(-1),
        "reverse": (q.exp() * (q - p)).sum(-1),
        "jensen_shannon": ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2,
    }
    return divergences[kind] * temperature**2
