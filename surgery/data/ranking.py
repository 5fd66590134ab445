"""Rank choices by likelihood, and measure perplexity.

Shape legend: B documents, K choices, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.choice_scores import paths_of, scored_choices
from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError, ProbeError
from surgery.probes.documents import Document

LARGEST = 1e100  # larger perplexities are reported as this number


class ChoiceScores(NamedTuple):
    """Scores of one question of each document.

    Attributes:
        correct: (B,) bool: the gold choice has the highest likelihood.
        margin: (B,) log-likelihood of the gold choice minus that of the best other; for choices of one token, the
            difference of their logits.
        lead: (B,) the same minus the mean of the others. Where answers are guesses its mean is 0, and no change of the
            model moves it on average; the best other moves with the spread of the scores.
    """

    correct: Tensor
    margin: Tensor
    lead: Tensor


def choice_scores(logits_BV: Tensor, batch: EncodedBatch) -> ChoiceScores:
    """Compare the gold choice with the best other, by the logits at each row's last query.

    Raises:
        ProbeError: the choices differ in later tokens only.
    """
    return compared(_first_token_scores(logits_BV, batch), batch.last_question()[1])


def _first_token_scores(logits_BV: Tensor, batch: EncodedBatch) -> Tensor:
    """Collect the logits of the choices at each row's last query: (B,K), -inf where there is no choice."""
    choices_BKC, _ = batch.last_question()
    if bool((choices_BKC[..., 1:] >= 0).any()):
        hint = "This method scores choices by one token. Set values of one token each, or use ablation."
        raise ProbeError("choices", "several tokens each", hint)
    ids_BK = choices_BKC[..., 0]
    return logits_BV.float().gather(1, ids_BK.clamp(min=0)).masked_fill(ids_BK < 0, -math.inf)


def compared(scores_BK: Tensor, gold_B: Tensor) -> ChoiceScores:
    """Compare the gold choice with the best other. Missing choices have a score of -inf."""
    gold_scores_B = scores_BK.gather(1, gold_B[:, None])[:, 0]
    others_B = scores_BK.scatter(1, gold_B[:, None], -math.inf).amax(1)
    margin = gold_scores_B - others_B
    exists_BK = (scores_BK > -math.inf).scatter(1, gold_B[:, None], False)
    mean_B = scores_BK.where(exists_BK, 0).sum(1) / exists_BK.sum(1)
    return ChoiceScores(margin > 0, margin, gold_scores_B - mean_B)


def answer_choices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> ChoiceScores:
    """Rank the choices of each document's last question."""
    return ranked(model, query_batches(documents, tokenizer, batch_size))


def query_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> list[EncodedBatch]:
    """Left-padded batches of the documents, up to the query of their last questions."""
    chunks = (documents[start : start + batch_size] for start in range(0, len(documents), batch_size))
    return [encode(chunk, tokenizer, padding_side="left", until_answer=True) for chunk in chunks]


@torch.no_grad()
def ranked(model: PreTrainedModel, batches: Sequence[EncodedBatch]) -> ChoiceScores:
    """Rank the choices of each row's last question. `lm_head` runs on the last token only.

    Choices of several tokens are decoded from the states of the prompt.

    Args:
        batches: left-padded, up to the query: `query_batches`.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    scores = []
    for batch in (cpu_batch.to(model.device) for cpu_batch in batches):
        scores.append(compared(choice_likelihoods(model, batch), batch.last_question()[1]))
    return ChoiceScores(*(torch.cat(parts).cpu() for parts in zip(*scores, strict=True)))


@torch.no_grad()
def choice_likelihoods(model: PreTrainedModel, batch: EncodedBatch) -> Tensor:
    """Score the choices of each row's last question: (B,K), -inf where there is none. Arguments as of `ranked`.

    Log-likelihoods if a choice has several tokens, otherwise logits.
    """
    paths = paths_of(batch)
    if paths is not None:
        scores_BK = scored_choices(model, batch, paths)
        check_logits(model, scores_BK)
        return scores_BK
    output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=1)
    check_logits(model, output.logits[:, -1])
    return _first_token_scores(output.logits[:, -1], batch)


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> float:
    """Perplexity per token, at most `LARGEST`. The first token of a text is not scored.

    Raises:
        ModelError: a logit is NaN or infinite.
    """
    total, count = 0.0, 0
    for start in range(0, len(documents), batch_size):
        batch = encode(documents[start : start + batch_size], tokenizer).to(model.device)
        output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        scored = batch.attention_mask[:, 1:].bool()
        logits_MV = output.logits[:, :-1][scored].float()
        total += cross_entropy(logits_MV, batch.input_ids[:, 1:][scored], reduction="sum").item()
        count += int(scored.sum())
    if math.isnan(total):
        raise _not_finite(model)
    if not count:
        raise ProbeError(documents[0].task, "texts of one token", "Use longer texts: the first token is not scored.")
    return math.exp(total / count) if total / count < math.log(LARGEST) else LARGEST


@torch.no_grad()
def answer_nats(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> tuple[float, int]:
    """Mean of -log p over the tokens of all answers, in nats, and the number of these tokens.

    Each token is predicted from the prompt and the correct tokens before it, as in the objective `answer`.

    Raises:
        ModelError: a logit is NaN or infinite.
        ProbeError: no document has an answer.
    """
    total, count = 0.0, 0
    for start in range(0, len(documents), batch_size):
        batch = encode(documents[start : start + batch_size], tokenizer, padding_side="left").to(model.device)
        if not bool(batch.answers.any()):
            continue
        first = int(batch.answers.any(0).nonzero()[0])  # column of the earliest token to predict
        kept = batch.input_ids.shape[1] - first + 1
        output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=kept)
        scored_BN, ids_BN = batch.answers[:, first:], batch.input_ids[:, first:]
        logits_MV = output.logits[:, :-1][scored_BN].float()
        check_logits(model, logits_MV)
        total += cross_entropy(logits_MV, ids_BN[scored_BN], reduction="sum").item()
        count += int(scored_BN.sum())
    if not count:
        raise ProbeError("documents", "no answers", "The loss of answers needs documents with questions.")
    return total / count, count


def check_logits(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise ModelError if a logit is NaN or infinite: it would count as a wrong answer."""
    if not bool((logits < math.inf).all()):
        raise _not_finite(model)


def _not_finite(model: PreTrainedModel) -> ModelError:
    value = f"the logits of {model.name_or_path or type(model).__name__} are NaN or infinite"
    hint = "Its training diverged, or the range of base.dtype is too small. Set base.dtype to float32."
    return ModelError("base.model", value, hint)
