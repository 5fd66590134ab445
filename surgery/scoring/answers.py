"""Whether a model says a probe's answer, beside choosing it. Owns: what counts, and the pass that finds it out.

An answer is said if the greedy text begins with it and does not go on within the same number or word; several values
that are asked for together are said if each stands in the text (RULER's rule). The rule is about text, so that it is
the same for every tokenizer, and for lm-eval (`lm_eval_tasks/data.py` has it too).

Greedy text begins with the answer exactly if every token of it is the likeliest one behind those before it. So one pass
over prompt and answer nearly always tells, and ranks the choices besides: where the likeliest token is another one, no
text that begins so can become the answer. What is left open (the same text in other tokens, or a list) is generated.

Must never know: arms, files. Shape legend: B prompts, T tokens, N positions from the longest answer's query on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.probes.documents import Document, Question
from surgery.scoring.generation import greedy
from surgery.scoring.ranking import ChoiceScores, check_logits, choice_scores, ranked, until_query

_BETWEEN = " ,"  # nothing else stands between answers that are asked for together


@dataclass(frozen=True)
class Said:
    """By prompt.

    Attributes:
        said: (B,) bool: the answer was said.
        begun: (B,) bool: the text begins with it, whatever follows: the rest is a matter of stopping.
        tokens: (B,) the share of its tokens that are the likeliest ones, each behind the right ones before it.
        ranked: over the choices of the last question; None where it has none.
    """

    said: Tensor
    begun: Tensor
    tokens: Tensor
    ranked: ChoiceScores | None


@torch.no_grad()
def say(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    batches: Sequence[EncodedBatch],
    naive: bool = False,
) -> Said:
    """Each document's last question, or the list that its last questions make, said and ranked.

    Args:
        documents: with choices all, or none of them.
        batches: the same, from `until_end`.
        naive: everything is generated, and ranked in a pass of its own.

    Raises:
        ProbeError: as `encode`.
        ModelError: a logit is NaN or infinite.
    """
    rows: list[list[bool]] = []
    tokens, scores = [], []
    for given in batches:
        batch, chunk = given.to(model.device), documents[len(rows) : len(rows) + len(given)]
        logits_BNV, likeliest_BN, from_B = _pass(model, batch, chunk)
        check_logits(model, logits_BNV[:, -1])
        right_BN = likeliest_BN[:, :-1] == batch.input_ids[:, 1 - likeliest_BN.shape[1] :]
        asked_BN = torch.arange(right_BN.shape[1], device=from_B.device) >= from_B[:, None]
        tokens.append(((right_BN & asked_BN).sum(1) / asked_BN.sum(1)).cpu())
        texts = _beginnings(batch.input_ids, likeliest_BN, right_BN | ~asked_BN, from_B, tokenizer)
        opened = [b for b, (d, text) in enumerate(zip(chunk, texts, strict=True)) if naive or _is_open(d, text)]
        for b, text in zip(opened, _generated(model, tokenizer, [chunk[b] for b in opened]), strict=True):
            texts[b] = text
        for document, text in zip(chunk, texts, strict=True):
            answers, bounded = answers_of(document)
            rows.append([is_said(text, answers, bounded), is_said(text, answers, bounded=False)])
        if chunk[0].questions[-1].choices:
            scores.append(_ranked(model, tokenizer, chunk, batch, logits_BNV, naive))
    said, begun = torch.tensor(rows).unbind(1)
    fields = ("correct", "margin")
    joined = ChoiceScores(*(torch.cat([getattr(s, name) for s in scores]) for name in fields)) if scores else None
    return Said(said, begun, torch.cat(tokens), joined)


def until_end(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int) -> list[EncodedBatch]:
    """Left-padded batches of the documents, without what stands behind their last answers."""
    cut = [Document(d.task, d.text[: d.questions[-1].answer[1]], d.questions) for d in documents]
    chunks = [cut[start : start + batch_size] for start in range(0, len(cut), batch_size)]
    return [encode(chunk, tokenizer, padding_side="left") for chunk in chunks]


def listed(document: Document) -> Sequence[Question]:
    """The last question, and those before it whose answers are in one list with its own."""
    questions, first = document.questions, len(document.questions) - 1
    while first and not document.text[questions[first - 1].answer[1] : questions[first].answer[0]].strip(_BETWEEN):
        first -= 1
    return questions[first:]


def is_said(text: str, answers: Sequence[str], bounded: bool) -> bool:
    """Whether a text that is all of what was said holds the answer, or the several.

    Args:
        bounded: a number or word that goes on behind the answer is another one.
    """
    if len(answers) > 1:
        return all(answer in text for answer in answers)
    text, answer = text.lstrip(), answers[0]
    if not text.startswith(answer):
        return False
    last, after = answer[-1], text[len(answer) : len(answer) + 1]
    goes_on = (last.isdigit() and after.isdigit()) or (last.isalpha() and after.isalpha())
    return not (bounded and goes_on)


def answers_of(document: Document) -> tuple[list[str], bool]:
    """What is to be said, and whether it ends in the document: a copied passage does not."""
    questions = listed(document)
    unbounded = questions[0].value is not None and questions[0].value == questions[0].segment
    return [document.text[slice(*q.answer)].strip() for q in questions], not unbounded


def most_tokens(document: Document) -> int:
    """Enough to say the answer and one more, however few characters a token has."""
    questions = listed(document)
    return questions[-1].answer[1] - questions[0].answer[0] + 1


def _pass(model: PreTrainedModel, batch: EncodedBatch, chunk: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """(B,N,V) logits, (B,N) the likeliest tokens, (B,) where in N each answer's (or list's) query is."""
    first = torch.tensor([len(d.questions) - len(listed(d)) for d in chunk], device=batch.query.device)
    query_B = batch.query.gather(1, first[:, None])[:, 0]
    kept = batch.input_ids.shape[1] - int(query_B.min())
    output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=kept)
    return output.logits, output.logits.argmax(-1), query_B - query_B.min()


def _beginnings(
    ids_BT: Tensor, likeliest_BN: Tensor, right_BN: Tensor, from_B: Tensor, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """How each greedy text begins: the answer's tokens as long as they are the likeliest, then the likeliest."""
    N = likeliest_BN.shape[1]
    followed_B = right_BN.long().cumprod(1).sum(1)  # columns before the first wrong one
    columns = (ids_BT[:, ids_BT.shape[1] - N :], likeliest_BN, from_B, followed_B)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return list(tokenizer.batch_decode([[*own[start + 1 : end + 1], top[end]] for own, top, start, end in rows]))


def _is_open(document: Document, text: str) -> bool:
    """Whether how the text goes on decides; it begins with `text`."""
    answers, bounded = answers_of(document)
    if len(answers) > 1:
        return not is_said(text, answers, bounded)
    text, (answer,) = text.lstrip(), answers
    return "\ufffd" in text or (answer.startswith(text) and (bounded or text != answer))


def _generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[str]:
    """What the model goes on with behind each prompt."""
    if not documents:
        return []
    firsts = [len(d.questions) - len(listed(d)) for d in documents]
    asked = [Document(d.task, d.text, d.questions[: first + 1]) for d, first in zip(documents, firsts, strict=True)]
    prompts = encode(asked, tokenizer, padding_side="left", until_answer=True).to(model.device)
    new_BN = greedy(model, prompts, max(map(most_tokens, documents)), tokenizer.eos_token_id)
    kept = [ids[: most_tokens(d)] for ids, d in zip(new_BN.tolist(), documents, strict=True)]
    return list(tokenizer.batch_decode(kept, skip_special_tokens=True))


def _ranked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chunk: Sequence[Document],
    batch: EncodedBatch,
    logits_BNV: Tensor,
    naive: bool,
) -> ChoiceScores:
    """From the same pass where one token tells the choices apart."""
    if naive or bool((batch.choice_rest >= 0).any()):
        return ranked(model, until_query(chunk, tokenizer, len(chunk)))
    rows = torch.arange(len(chunk), device=logits_BNV.device)
    last_B = (batch.gold >= 0).sum(1) - 1
    column_B = batch.query[rows, last_B] - (batch.input_ids.shape[1] - logits_BNV.shape[1])
    scores = choice_scores(logits_BNV[rows, column_B], batch)
    return ChoiceScores(scores.correct.cpu(), scores.margin.cpu())


__all__ = ["Said", "answers_of", "is_said", "listed", "most_tokens", "say", "until_end"]
