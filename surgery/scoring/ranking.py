"""Scores one model on documents. Owns: choice accuracy and perplexity. Must never know: arms, files.

Shape legend: B documents, K choices, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError, ProbeError
from surgery.probes.documents import Document
from surgery.scoring.choices import paths_of, scored_choices

LARGEST = 1e100  # perplexities above it are no numbers that a file, a table or a figure has use for


@dataclass(frozen=True)
class ChoiceScores:
    """For each document: whether the gold choice won, and by how much.

    The margin is the gold choice's log-likelihood minus the best other's, which for choices of one token is the
    difference of their logits.
    """

    correct: Tensor
    margin: Tensor


def choice_scores(logits_BV: Tensor, batch: EncodedBatch) -> ChoiceScores:
    """Compares the gold choice with the best of the others, on the logits of each row's last question.

    Raises:
        ProbeError: it takes more than the first token to tell them apart.
    """
    choices_BKC, gold_B = batch.last_question()
    if bool((choices_BKC[..., 1:] >= 0).any()):
        hint = "One step cannot score them, and neither can a gradient of one; evaluating and removing heads can."
        raise ProbeError("choices", "several tokens each", hint)
    ids_BK = choices_BKC[..., 0]
    scores_BK = logits_BV.float().gather(1, ids_BK.clamp(min=0)).masked_fill(ids_BK < 0, -math.inf)
    return compared(scores_BK, gold_B)


def compared(scores_BK: Tensor, gold_B: Tensor) -> ChoiceScores:
    """The gold choice against the best of the others; -inf scores are of choices that a row does not have."""
    gold_scores_B = scores_BK.gather(1, gold_B[:, None])[:, 0]
    others_B = scores_BK.scatter(1, gold_B[:, None], -math.inf).amax(1)
    margin = gold_scores_B - others_B
    return ChoiceScores(margin > 0, margin)


def answer_choices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> ChoiceScores:
    """Each document's last question, scored over its choices."""
    return ranked(model, query_batches(documents, tokenizer, batch_size))


def query_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> list[EncodedBatch]:
    """Left-padded batches of the documents, up to the query of their last questions."""
    chunks = (documents[start : start + batch_size] for start in range(0, len(documents), batch_size))
    return [encode(chunk, tokenizer, padding_side="left", until_answer=True) for chunk in chunks]


@torch.no_grad()
def ranked(model: PreTrainedModel, batches: Sequence[EncodedBatch]) -> ChoiceScores:
    """The last question of each row, scored over its choices: `lm_head` on the last token only.

    Where it takes several tokens to tell a batch's choices apart, they are decoded from the prompt's states.

    Args:
        batches: left-padded, ending at the query.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    found = []
    for given in batches:
        batch = given.to(model.device)
        paths = paths_of(batch)
        if paths is None:
            output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=1)
            check_logits(model, output.logits[:, -1])
            found.append(choice_scores(output.logits[:, -1], batch))
        else:
            _, gold_B = batch.last_question()
            scores_BK = scored_choices(model, batch, paths)
            check_logits(model, scores_BK)
            found.append(compared(scores_BK, gold_B))
    return ChoiceScores(torch.cat([f.correct for f in found]).cpu(), torch.cat([f.margin for f in found]).cpu())


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> float:
    """exp of the mean negative log-likelihood a token, `LARGEST` at most; the first token of a text is not scored.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    total, count = 0.0, 0
    for start in range(0, len(documents), batch_size):
        batch = encode(documents[start : start + batch_size], tokenizer).to(model.device)
        output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        scored = batch.attention_mask[:, 1:].bool()
        losses = torch.nn.functional.cross_entropy(
            output.logits[:, :-1][scored].float(), batch.input_ids[:, 1:][scored], reduction="sum"
        )
        total, count = total + losses.item(), count + int(scored.sum())
    if math.isnan(total):
        raise _no_numbers(model)
    return math.exp(total / count) if total / count < math.log(LARGEST) else LARGEST


def check_logits(model: PreTrainedModel, logits: Tensor) -> None:
    """Raises ModelError where one is NaN or has overflowed: whatever is counted from it would be called wrong."""
    if not bool((logits < math.inf).all()):
        raise _no_numbers(model)


def _no_numbers(model: PreTrainedModel) -> ModelError:
    value = f"the logits of {model.name_or_path or type(model).__name__} are NaN or infinite"
    return ModelError("base.model", value, "Its training diverged, or base.dtype is too narrow for it.")
