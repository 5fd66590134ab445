"""Objectives against naive loops over single tokens, in double precision."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.generated import with_ends
from surgery.models.meters import saved_bytes
from surgery.recipe import Distil
from surgery.train.divergence import TopK
from surgery.train.losses import (
    answer_loss,
    attention_kl_loss,
    attention_loss,
    attention_mse_loss,
    divergence_loss,
    hidden_loss,
    lm_loss,
)
from surgery.train.objectives import counts
from surgery.types import Reads
from tests.support.long_choices import digit_tokenizer
from tests.support.oracles import naive_divergence
from tests.support.pico import pico_tokenizer
from tests.support.samples import sample, several_questions

V = 1024
SIDES = ("left", "right")


Tokenizer = Callable[[], PreTrainedTokenizerFast]
BOTH = pytest.mark.parametrize("tokenizer", [pico_tokenizer, digit_tokenizer], ids=["one token", "several tokens"])


def batch_of(side: str = "right", plain: bool = True, tokenizer: Tokenizer = pico_tokenizer) -> EncodedBatch:
    """Dictionaries of several lengths and questions, and plain text among them."""
    documents = [*several_questions(), *(sample("sentence", 2) if plain else [])]
    return encode(documents, tokenizer(), side)  # type: ignore[arg-type]


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
def test_lm_loss_counts_every_token_but_the_first(side: str) -> None:
    batch = batch_of(side)
    logits = logits_for(batch)
    expected = naive_next_token(logits, batch, batch.attention_mask)
    assert float(lm_loss(logits, batch)) == pytest.approx(expected, rel=1e-5)


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
    for settings in (Distil(), Distil(top_k=3)):
        loss = divergence_loss(logits, base, batch, settings)
        assert divergence_loss(spoiled, base, batch, settings) == loss
    assert lm_loss(spoiled, batch) == lm_loss(logits, batch)


def test_answer_loss_refuses_where_nothing_is_answered() -> None:
    batch = encode(sample("sentence"), pico_tokenizer())
    with pytest.raises(ValueError, match="answer"):
        answer_loss(logits_for(batch), batch)


def test_sure_and_right_costs_nothing() -> None:
    batch = batch_of("right")
    logits = torch.zeros(*batch.input_ids.shape, V)
    logits[:, :-1].scatter_(2, batch.input_ids[:, 1:, None], 100.0)
    assert float(answer_loss(logits, batch)) == pytest.approx(0, abs=1e-6)
    assert float(lm_loss(logits, batch)) == pytest.approx(0, abs=1e-6)


def test_knowing_nothing_costs_the_logarithm_of_the_vocabulary() -> None:
    batch = batch_of("right")
    logits = torch.zeros(*batch.input_ids.shape, V)
    assert float(answer_loss(logits, batch)) == pytest.approx(math.log(V), rel=1e-6)
    assert float(lm_loss(logits, batch)) == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("side", SIDES)
def test_divergence_loss_is_the_mean_over_real_tokens(side: str) -> None:
    batch = batch_of(side)
    student, base = logits_for(batch, 1), logits_for(batch, 2)
    found = []
    for b in range(len(batch)):
        for t in range(batch.input_ids.shape[1]):
            if batch.attention_mask[b, t]:
                p, q = log_softmax(base[b, t]), log_softmax(student[b, t])
                found.append(float((p.exp() * (p - q)).sum()))
    loss = float(divergence_loss(student, base, batch, Distil()))
    assert loss == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_divergence_loss_follows_its_settings() -> None:
    batch = batch_of()[2:3]  # the longest: no padding
    assert bool(batch.attention_mask.all())
    student, base = logits_for(batch, 1), logits_for(batch, 2)
    settings = Distil(divergence="reverse", temperature=3.0)
    expected = naive_divergence(student.double(), base.double(), "reverse", 3.0).mean()
    assert float(divergence_loss(student, base, batch, settings)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_the_likeliest_tokens_may_be_given_for_the_real_tokens_alone(side: str) -> None:
    batch = batch_of(side)
    student, base = logits_for(batch, 1), logits_for(batch, 2)
    settings = Distil(top_k=4, divergence="jensen_shannon")
    top = TopK.of(base[batch.attention_mask.bool()], 4)
    assert divergence_loss(student, top, batch, settings) == divergence_loss(student, base, batch, settings)


def rows_on(batch: EncodedBatch, gold: Sequence[Tensor], share: float = 1.0) -> Tensor:
    """(B,H,R,T) rows that put `share` on each head's gold position and the rest on token 0."""
    (B, R), T = batch.read_query.shape, batch.input_ids.shape[1]
    rows = torch.zeros(B, len(gold), R, T, dtype=torch.float64)
    rows[..., 0] = 1 - share
    for head, gold_BR in enumerate(gold):
        rows[:, head].scatter_(2, gold_BR.clamp(min=0)[..., None], share)
    return rows


@BOTH
def test_attention_loss_is_zero_when_all_mass_is_on_gold(tokenizer: Tokenizer) -> None:
    batch = batch_of(tokenizer=tokenizer)
    rows = rows_on(batch, [batch.read_segment_end, batch.read_answer_token])
    assert float(attention_loss([rows], [("segment_end", "answer_token")], batch)) == pytest.approx(0, abs=1e-6)


def test_attention_loss_looks_at_the_position_that_the_head_reads() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.read_segment_end, batch.read_answer_token])
    assert float(attention_loss([rows], [("answer_token", "segment_end")], batch)) > 10


@BOTH
def test_attention_loss_is_the_mean_logarithm_of_the_mass_on_gold(tokenizer: Tokenizer) -> None:
    batch = batch_of(plain=True, tokenizer=tokenizer)
    rng = torch.Generator().manual_seed(3)
    shape = (batch.read_query.shape[1], batch.input_ids.shape[1])
    rows = [torch.randn(len(batch), h, *shape, generator=rng).double().softmax(-1) for h in (2, 1)]
    reads: list[tuple[Reads, ...]] = [("segment_end", "answer_token"), ("answer_token",)]
    heads = []
    for layer, layer_reads in zip(rows, reads, strict=True):
        for h, read in enumerate(layer_reads):
            found = []
            for b in range(len(batch)):
                for r in range(batch.read_query.shape[1]):
                    if batch.read_query[b, r] >= 0:
                        found.append(-math.log(layer[b, h, r, int(getattr(batch, f"read_{read}")[b, r])]))
            heads.append(sum(found) / len(found))
    assert float(attention_loss(rows, reads, batch)) == pytest.approx(sum(heads) / len(heads), rel=1e-5)


def first_token_loss(rows_BHQT: Tensor, read: Reads, batch: EncodedBatch) -> Tensor:
    """Attention supervision of the questions alone: of each answer's first token."""
    included_BQ = (batch.segment_end >= 0) & (batch.answer_token >= 0)
    gold_BQ = batch.segment_end if read == "segment_end" else batch.answer_token
    mass = rows_BHQT[:, 0].float().gather(-1, gold_BQ.clamp(min=0)[..., None])[..., 0]
    return -torch.log(mass[included_BQ]).sum() / int(included_BQ.sum())


@pytest.mark.parametrize("read", ["segment_end", "answer_token"])
@pytest.mark.parametrize("ends", [False, True])
def test_answers_of_one_token_have_the_loss_of_their_first_token_bit_for_bit(read: Reads, ends: bool) -> None:
    documents = [with_ends(d) if ends else d for d in several_questions()]
    one, several = (encode(documents, tokenizer()) for tokenizer in (pico_tokenizer, digit_tokenizer))
    shape = (len(one), 1, one.query.shape[1], one.input_ids.shape[1])
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(5)).softmax(-1)
    assert attention_loss([rows], [(read,)], one) == first_token_loss(rows, read, one)
    assert counts(one, ["attention"])["attention"] == int((one.query >= 0).sum())
    assert counts(several, ["attention"])["attention"] > int((several.query >= 0).sum())


@pytest.mark.parametrize("gap", [30.0, 60.0])
@pytest.mark.parametrize("objective", ["attention", "attention_kl"])
def test_attention_far_from_gold_has_the_gradient_of_the_logarithm(objective: str, gap: float) -> None:
    """By the scores it is a - gold. A head copied from an SSM head can begin with scores this far apart."""
    batch = batch_of(plain=False)
    gold = rows_on(batch, [batch.read_answer_token])
    scores = (torch.randn(gold.shape, generator=torch.Generator().manual_seed(0)) - gap * gold).requires_grad_()
    rows = scores.softmax(-1)
    if objective == "attention":
        loss = attention_loss([rows], [("answer_token",)], batch)
    else:
        loss = attention_kl_loss([rows], [gold], batch)
    included = (batch.read_query >= 0)[:, None, :, None]
    assert float((rows * gold).detach().sum(-1).max()) < 1e-9
    gradient = torch.autograd.grad(loss, scores)[0]
    torch.testing.assert_close(gradient, (rows.detach() - gold) * included / included.sum(), atol=1e-7, rtol=1e-4)


def test_attention_loss_stays_finite_without_any_mass_on_gold() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.read_segment_end], share=0.0)
    assert math.isfinite(float(attention_loss([rows], [("segment_end",)], batch)))


@pytest.mark.parametrize("task", ["sentence", "closed_book", "option_text"])
@pytest.mark.parametrize("read", ["segment_end", "answer_token"])
def test_attention_loss_refuses_where_nothing_is_to_be_read(task: str, read: Reads) -> None:
    batch = encode(sample(task), pico_tokenizer())
    rows = torch.ones(len(batch), 1, batch.read_query.shape[1], batch.input_ids.shape[1])
    with pytest.raises(ValueError, match="gold position"):
        attention_loss([rows], [(read,)], batch)


def test_attention_loss_refuses_rows_and_reads_that_do_not_match() -> None:
    batch = batch_of()
    rows = rows_on(batch, [batch.read_segment_end])
    with pytest.raises(ValueError, match="zip"):
        attention_loss([rows, rows], [("segment_end",)], batch)


def test_a_read_without_both_gold_positions_does_not_count() -> None:
    batch = batch_of(plain=False)
    rows = rows_on(batch, [batch.read_segment_end], share=0.5)
    rows[0, :, 0] = 1e-3
    without = dataclasses.replace(batch, read_answer_token=batch.read_answer_token.clone())
    without.read_answer_token[0, 0] = -1
    assert counts(without, ["attention"])["attention"] == counts(batch, ["attention"])["attention"] - 1
    assert float(attention_loss([rows], [("segment_end",)], without)) == pytest.approx(-math.log(0.5), rel=1e-5)


def test_the_first_token_can_be_a_gold_position() -> None:
    batch = batch_of(plain=False)
    gold = {name: getattr(batch, name).clone() for name in ("read_segment_end", "read_answer_token")}
    first = dataclasses.replace(batch, **gold)
    first.read_segment_end[0, 0] = first.read_answer_token[0, 0] = 0
    assert counts(first, ["attention"]) == counts(batch, ["attention"])
    rows = rows_on(first, [first.read_segment_end], share=0.5)
    rows[0, 0, 0, 0] = 0.25
    number = counts(first, ["attention"])["attention"]
    expected = (math.log(4) + (number - 1) * math.log(2)) / number
    assert float(attention_loss([rows], [("segment_end",)], first)) == pytest.approx(expected, rel=1e-5)


def random_rows(batch: EncodedBatch, seed: int) -> list[Tensor]:
    """Two layers, of two heads and of one: (B,H,T,T) of numbers everywhere, in the future and on padding too."""
    rng = torch.Generator().manual_seed(seed)
    T = batch.input_ids.shape[1]
    return [torch.rand(len(batch), h, T, T, generator=rng) for h in (2, 1)]


def random_states(batch: EncodedBatch, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch.input_ids.shape, 8, generator=rng) for _ in range(3)]


@pytest.mark.parametrize("side", SIDES)
def test_attention_mse_loss_is_the_squared_distance_of_the_causal_rows(side: str) -> None:
    batch = batch_of(side)
    mine, other = random_rows(batch, 0), random_rows(batch, 1)
    heads = []
    for a, b in zip(mine, other, strict=True):
        for h in range(a.shape[1]):
            total, tokens = 0.0, 0
            for d in range(len(batch)):
                places = batch.attention_mask[d].nonzero()[:, 0]
                for i, t in enumerate(places):
                    total += float((a[d, h, t, places[: i + 1]] - b[d, h, t, places[: i + 1]]).double().square().sum())
                    tokens += 1
            heads.append(total / tokens)
    assert float(attention_mse_loss(mine, other, batch)) == pytest.approx(sum(heads) / len(heads), rel=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_hidden_loss_is_the_mean_length_of_the_difference(side: str) -> None:
    batch = batch_of(side)
    mine, other = random_states(batch, 0), random_states(batch, 1)
    found = []
    for a, b in zip(mine, other, strict=True):
        for d, t in batch.attention_mask.nonzero().tolist():
            found.append(math.sqrt(float((a[d, t] - b[d, t]).double().square().sum())))
    assert float(hidden_loss(mine, other, batch)) == pytest.approx(sum(found) / len(found), rel=1e-5)


@BOTH
def test_attention_kl_loss_is_the_mean_divergence_of_the_reads_rows(tokenizer: Tokenizer) -> None:
    """Against torch's own; padded reads do not count, and its gradient by the scores is a - a'."""
    batch = batch_of(tokenizer=tokenizer)
    R, asked = batch.read_query.shape[1], (batch.read_query >= 0).nonzero().tolist()
    scores = [x[:, :, :R].clone().requires_grad_() for x in random_rows(batch, 0)]
    theirs = [x[:, :, :R].softmax(-1) for x in random_rows(batch, 1)]
    loss = attention_kl_loss([x.softmax(-1) for x in scores], theirs, batch)
    found = [
        F.kl_div(a[d, h, q].log_softmax(-1), b[d, h, q], reduction="sum")
        for a, b in zip(scores, theirs, strict=True)
        for h in range(a.shape[1])
        for d, q in asked
    ]
    assert 0 < len(asked) < batch.read_query.numel()
    assert float(loss) == pytest.approx(float(sum(found)) / len(found), rel=1e-5)
    for leaf, gradient, other in zip(scores, torch.autograd.grad(loss, scores), theirs, strict=True):
        expected = torch.zeros_like(leaf)
        for d, q in asked:
            expected[d, :, q] = (leaf[d, :, q].softmax(-1) - other[d, :, q]) / len(found)
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_where_student_and_teacher_agree_the_gradient_is_zero_and_finite() -> None:
    batch = batch_of()
    for loss, made in ((attention_mse_loss, random_rows), (hidden_loss, random_states)):
        mine = [x.requires_grad_() for x in made(batch, 0)]
        found = loss(mine, [x.detach().clone() for x in mine], batch)
        assert float(found) == 0
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(found, mine))


def loss_of(name: str, batch: EncodedBatch, model: list[Tensor], count: float | None) -> Tensor:
    """An objective on outputs that stand for the whole batch's: `model` is cut to the batch's rows by the caller."""
    if name in ("answer", "lm"):
        return {"answer": answer_loss, "lm": lm_loss}[name](model[0], batch, count)
    if name in ("base_kl", "distil"):
        base = model[0].detach().roll(7, dims=-1)
        return divergence_loss(model[0], base, batch, Distil(top_k=5 if name == "distil" else None), count)
    if name == "attention":
        rows = [x.softmax(-1) for x in model]
        return attention_loss(rows, [("segment_end", "answer_token"), ("answer_token",)], batch, count)
    if name == "attention_kl":
        return attention_kl_loss(
            [x.softmax(-1) for x in model], [x.detach().flip(-1).softmax(-1) for x in model], batch, count
        )
    other = [x.detach().flip(-1) for x in model]
    return {"attention_mse": attention_mse_loss, "hidden_mse": hidden_loss}[name](model, other, batch, count)


def outputs_for(name: str, batch: EncodedBatch) -> list[Tensor]:
    if name in ("attention_mse", "hidden_mse"):
        return {"attention_mse": random_rows, "hidden_mse": random_states}[name](batch, 4)
    if name in ("attention", "attention_kl"):
        R = batch.read_query.shape[1]
        return [x[:, :, :R] for x in random_rows(batch, 4)]
    return [logits_for(batch)]


OBJECTIVES = ("answer", "attention", "base_kl", "lm", "distil", "attention_kl", "attention_mse", "hidden_mse")


@BOTH
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_parts_of_a_batch_add_up_to_the_whole(name: str, tokenizer: Tokenizer) -> None:
    """Two processes with different numbers of terms, one of them perhaps with none: loss and gradient."""
    batch, processes = batch_of(tokenizer=tokenizer), 2  # five documents: three with questions, two of plain text
    leaves = [x.double().requires_grad_() for x in outputs_for(name, batch)]
    whole = loss_of(name, batch, leaves, None)
    expected = torch.autograd.grad(whole, leaves)
    number = counts(batch, [name])[name]
    found = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 5)):
        part = batch[rows]
        loss = loss_of(name, part, [x[rows] for x in leaves], number / processes) / processes
        loss.backward()
        found = found + loss.detach()
    assert float(found) == pytest.approx(float(whole), rel=1e-6)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_counts_are_the_numbers_of_terms(name: str) -> None:
    """A loss divided by 1 is the sum of its terms: as many times the mean as there are terms."""
    batch = batch_of()
    outputs = outputs_for(name, batch)
    total, mean = (float(loss_of(name, batch, outputs, count)) for count in (1, None))
    assert round(total / mean, 3) == counts(batch, OBJECTIVES)[name]


@pytest.mark.parametrize("name", ["answer", "attention"])
def test_a_part_without_terms_still_depends_on_the_model(name: str) -> None:
    batch = encode(sample("sentence"), pico_tokenizer())
    leaves = [x.requires_grad_() for x in outputs_for(name, batch)]
    loss = loss_of(name, batch, leaves, 6)
    assert float(loss) == 0
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(loss, leaves))


def test_few_terms_keep_few_logits_for_the_backward_pass() -> None:
    batch = batch_of()
    logits = logits_for(batch).requires_grad_()
    with saved_bytes() as saved:
        answer_loss(logits, batch)
    assert saved.total < 0.2 * logits.nbytes


@pytest.mark.parametrize("side", SIDES)
def test_an_answer_with_nothing_before_it_is_no_term(side: str) -> None:
    """On the first real token of a row nothing predicts it, whatever padding stands before."""
    batch = batch_of(side)
    first = dataclasses.replace(batch, answers=batch.answers.clone())
    for b in range(len(batch)):
        first.answers[b, int(batch.attention_mask[b].nonzero()[0])] = True
    assert counts(first, ["answer"]) == counts(batch, ["answer"])
    assert answer_loss(logits_for(batch), first) == answer_loss(logits_for(batch), batch)
