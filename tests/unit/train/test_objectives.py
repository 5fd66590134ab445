"""Objectives against naive loops over single tokens, in double precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surgery.heads import Reads
from surgery.probes.documents import EncodedBatch, encode
from surgery.train.objectives import answer_loss, attention_loss, keep_loss, text_loss
from tests.pico import pico_tokenizer
from tests.unit.probes.samples import sample, several_questions

V = 1024
SIDES = ("left", "right")


def batch_of(side: str = "right", plain: bool = True) -> EncodedBatch:
    """Dictionaries of several lengths and questions, and plain text among them."""
    documents = [*several_questions(), *(sample("sentence", 2) if plain else [])]
    return encode(documents, pico_tokenizer(), side)  # type: ignore[arg-type]


def logits_for(batch: EncodedBatch, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*batch.input_ids.shape, V, generator=rng) * 3


def log_softmax(row: Tensor) -> Tensor:
    row = row.double()
    return row - torch.log(torch.exp(row).sum())


def naive_next_token(logits: Tensor, batch: EncodedBatch, counts: Tensor) -> float:
    """The mean over documents' tokens that count; a document's first token has nothing before it."""
    found = []
    for b in range(len(batch)):
        places = [t for t in range(batch.input_ids.shape[1]) if batch.attention_mask[b, t]]
        for before, t in itertools.pairwise(places):
            if counts[b, t]:
                found.append(-float(log_softmax(logits[b, before])[batch.input_ids[b, t]]))
    return sum(found) / len(found)


@pytest.mark.parametrize("side", SIDES)
def test_answer_loss_counts_answers_and_nothing_else(side: str) -> None:
    batch = batch_of(side)
    logits = logits_for(batch)
    assert float(answer_loss(logits, batch)) == pytest.approx(naive_next_token(logits, batch, batch.answers), rel=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_text_loss_counts_every_token_but_the_first(side: str) -> None:
    batch = batch_of(side)
    logits = logits_for(batch)
    expected = naive_next_token(logits, batch, batch.attention_mask)
    assert float(text_loss(logits, batch)) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_reaches_the_tokens_before_answers_alone() -> None:
    batch = batch_of("right")
    logits = logits_for(batch).requires_grad_()
    answer_loss(logits, batch).backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum(-1) > 0
    expected = torch.zeros_like(batch.answers)
    expected[:, :-1] = batch.answers[:, 1:]
    assert torch.equal(touched, expected)


@pytest.mark.parametrize("side", SIDES)
def test_padding_does_not_count(side: str) -> None:
    batch = batch_of(side)
    logits, base = logits_for(batch), logits_for(batch, 1)
    spoiled = torch.where(batch.attention_mask[..., None].bool(), logits, torch.full_like(logits, 50.0).cumsum(-1))
    assert (spoiled != logits).any()
    assert answer_loss(spoiled, batch) == answer_loss(logits, batch)
    assert keep_loss(spoiled, base, batch) == keep_loss(logits, base, batch)
    assert text_loss(spoiled, batch) == text_loss(logits, batch)


def test_answer_loss_refuses_where_nothing_is_answered() -> None:
    batch = encode(sample("sentence"), pico_tokenizer())
    with pytest.raises(ValueError, match="answer"):
        answer_loss(logits_for(batch), batch)


def test_sure_and_right_costs_nothing() -> None:
    batch = batch_of("right")
    logits = torch.zeros(*batch.input_ids.shape, V)
    logits[:, :-1].scatter_(2, batch.input_ids[:, 1:, None], 100.0)
    assert float(answer_loss(logits, batch)) == pytest.approx(0, abs=1e-6)
    assert float(text_loss(logits, batch)) == pytest.approx(0, abs=1e-6)


def test_knowing_nothing_costs_the_logarithm_of_the_vocabulary() -> None:
    batch = batch_of("right")
    logits = torch.zeros(*batch.input_ids.shape, V)
    assert float(answer_loss(logits, batch)) == pytest.approx(math.log(V), rel=1e-6)
    assert float(text_loss(logits, batch)) == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("side", SIDES)
def test_keep_loss_is_the_divergence_from_the_base(side: str) -> None:
    batch = batch_of(side)
    student, base = logits_for(batch, 1), logits_for(batch, 2)
    found = []
    for b in range(len(batch)):
        for t in range(batch.input_ids.shape[1]):
            if batch.attention_mask[b, t]:
                p, q = log_softmax(base[b, t]), log_softmax(student[b, t])
                found.append(float((p.exp() * (p - q)).sum()))
    assert float(keep_loss(student, base, batch)) == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_keep_loss_is_zero_for_equal_predictions_and_positive_otherwise() -> None:
    batch = batch_of()
    logits = logits_for(batch)
    assert float(keep_loss(logits, logits, batch)) == pytest.approx(0, abs=1e-6)
    assert float(keep_loss(logits + 5, logits, batch)) == pytest.approx(0, abs=1e-5)
    assert float(keep_loss(logits_for(batch, 1), logits, batch)) > 0.1


def rows_on(batch: EncodedBatch, gold: Sequence[Tensor], share: float = 1.0) -> Tensor:
    """(B,H,Q,T) rows that put `share` on each head's gold position and the rest on token 0."""
    (B, Q), T = batch.query.shape, batch.input_ids.shape[1]
    rows = torch.zeros(B, len(gold), Q, T, dtype=torch.float64)
    rows[..., 0] = 1 - share
    for head, gold_BQ in enumerate(gold):
        rows[:, head].scatter_(2, gold_BQ.clamp(min=0)[..., None], share)
    return rows


def test_attention_loss_is_zero_when_all_mass_is_on_gold() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.segment_end, batch.answer_token])
    assert float(attention_loss([rows], [("segment_end", "answer_token")], batch)) == pytest.approx(0, abs=1e-6)


def test_attention_loss_looks_at_the_position_that_the_head_reads() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.segment_end, batch.answer_token])
    assert float(attention_loss([rows], [("answer_token", "segment_end")], batch)) > 10


def test_attention_loss_is_the_mean_logarithm_of_the_mass_on_gold() -> None:
    batch = batch_of(plain=True)
    rng = torch.Generator().manual_seed(3)
    shape = (batch.query.shape[1], batch.input_ids.shape[1])
    rows = [torch.randn(len(batch), h, *shape, generator=rng).double().softmax(-1) for h in (2, 1)]
    reads: list[tuple[Reads, ...]] = [("segment_end", "answer_token"), ("answer_token",)]
    heads = []
    for layer, layer_reads in zip(rows, reads, strict=True):
        for h, read in enumerate(layer_reads):
            found = []
            for b in range(len(batch)):
                for q in range(batch.query.shape[1]):
                    if batch.query[b, q] >= 0:
                        found.append(-math.log(layer[b, h, q, int(getattr(batch, read)[b, q])]))
            heads.append(sum(found) / len(found))
    assert float(attention_loss(rows, reads, batch)) == pytest.approx(sum(heads) / len(heads), rel=1e-5)


def test_attention_loss_stays_finite_without_any_mass_on_gold() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.segment_end], share=0.0)
    assert math.isfinite(float(attention_loss([rows], [("segment_end",)], batch)))


@pytest.mark.parametrize("task", ["sentence", "closed_book", "option_text"])
@pytest.mark.parametrize("read", ["segment_end", "answer_token"])
def test_attention_loss_refuses_where_nothing_is_to_be_read(task: str, read: Reads) -> None:
    batch = encode(sample(task), pico_tokenizer())
    rows = torch.ones(len(batch), 1, batch.query.shape[1], batch.input_ids.shape[1])
    with pytest.raises(ValueError, match="gold position"):
        attention_loss([rows], [(read,)], batch)


def test_attention_loss_refuses_rows_and_reads_that_do_not_match() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.segment_end])
    with pytest.raises(ValueError, match="zip"):
        attention_loss([rows, rows], [("segment_end",)], batch)
