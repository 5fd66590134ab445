"""Slow, independent versions of what the package computes, for tests to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.probes.documents import Document
from surgery.scoring.generation import GeneratedAnswers, answer_list, expected_answers, is_match, max_answer_tokens
from surgery.scoring.ranking import answer_choices


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
