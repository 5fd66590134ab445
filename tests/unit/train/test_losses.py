"""Objectives against naive loops over single tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch, encode
from surgery.models.meters import saved_bytes
from surgery.recipe import Distil
from surgery.recipe.objectives import OBJECTIVES
from surgery.train.divergence import TopK
from surgery.train.objectives import ObjectiveInputs, Outputs
from surgery.types import Reads
from tests.support.long_choices import digit_tokenizer
from tests.support.oracles import naive_divergence
from tests.support.pico import pico_tokenizer
from tests.support.samples import sample, several_questions

V = 1024
Tokenizer = Callable[[], PreTrainedTokenizerFast]
TOKENIZERS: tuple[Tokenizer, ...] = (pico_tokenizer, digit_tokenizer)  # values of one token, and of several
FIELDS = {
    "attention": "attention",
    "attention_kl": "attention",
    "attention_mse": "full_attention",
    "hidden_mse": "hidden_states",
}
READS: list[tuple[Reads, ...]] = [("segment_end", "answer_token"), ("answer_token",)]


def batch_of(side: Any = "right", tokenizer: Tokenizer = pico_tokenizer) -> EncodedBatch:
    """Dictionaries of several lengths and questions, and plain text among them."""
    return encode([*several_questions(), *sample("sentence", 2)], tokenizer(), side)


def sides() -> Iterator[EncodedBatch]:
    yield batch_of("right")
    yield batch_of("left")


def logits_for(batch: EncodedBatch, seed: int = 0) -> Tensor:
    return torch.randn(*batch.input_ids.shape, V, generator=torch.Generator().manual_seed(seed)) * 3


def matrices(batch: EncodedBatch, seed: int) -> list[Tensor]:
    """Two layers, of two heads and of one: (B,H,T,T) of numbers everywhere, in the future and on padding too."""
    rng, T = torch.Generator().manual_seed(seed), batch.input_ids.shape[1]
    return [torch.rand(len(batch), h, T, T, generator=rng) for h in (2, 1)]


def rows(batch: EncodedBatch, seed: int) -> list[Tensor]:
    """Scores at the reads: (B,H,R,T)."""
    return [x[:, :, : batch.read_query.shape[1]] for x in matrices(batch, seed)]


def streams(batch: EncodedBatch, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch.input_ids.shape, 8, generator=rng) for _ in range(3)]


def loss_of(name: str, batch: EncodedBatch, mine: Any, theirs: Any = None, distil: Any = None, reads: Any = ()) -> Any:
    """Of an objective that compares these outputs, which are its only ones."""
    field = FIELDS.get(name, "logits")
    model, other = Outputs(**{field: mine}), Outputs() if theirs is None else Outputs(**{field: theirs})
    return OBJECTIVES[name].loss(ObjectiveInputs(batch, model, other, other, distil or Distil(), reads))


def divergence_loss(logits: Tensor, target: Any, batch: EncodedBatch, settings: Distil) -> Any:
    of_base, of_teacher = (loss_of(name, batch, logits, target, settings) for name in ("base_kl", "distil"))
    assert of_base == of_teacher
    return of_base


def count(name: str, batch: EncodedBatch) -> int:
    return OBJECTIVES[name].count(batch)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def naive_next_token(logits: Tensor, batch: EncodedBatch, included: Tensor) -> list[float]:
    """Of every token that is included; a document's first token has nothing before it."""
    found = []
    for b in range(len(batch)):
        for before, t in itertools.pairwise(batch.attention_mask[b].nonzero()[:, 0].tolist()):
            if included[b, t]:
                found.append(-float(logits[b, before].double().log_softmax(-1)[batch.input_ids[b, t]]))
    return found


def test_next_token_losses() -> None:
    for batch in sides():
        logits = logits_for(batch)
        for name, included in (("answer", batch.answers), ("lm", batch.attention_mask)):
            expected = naive_next_token(logits, batch, included)
            assert float(loss_of(name, batch, logits)) == pytest.approx(sum(expected), rel=1e-5), name
            assert count(name, batch) == len(expected), name


def test_the_gradient_reaches_the_tokens_before_answers_alone_and_keeps_few_logits() -> None:
    batch = batch_of()
    logits = logits_for(batch).requires_grad_()
    with saved_bytes() as saved:
        loss = loss_of("answer", batch, logits)
    assert saved.total < 0.2 * logits.nbytes
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal((gradient.abs().sum(-1) > 0)[:, :-1], batch.answers[:, 1:]) and not gradient[:, -1].any()


def test_padding_and_what_nothing_precedes_do_not_count() -> None:
    for batch in sides():
        logits, base = logits_for(batch), logits_for(batch, 1)
        spoiled = torch.where(batch.attention_mask[..., None].bool(), logits, torch.full_like(logits, 50.0).cumsum(-1))
        assert (spoiled != logits).any()
        for name in ("answer", "lm"):
            assert loss_of(name, batch, spoiled) == loss_of(name, batch, logits)
        for settings in (Distil(), Distil(top_k=3)):
            loss = divergence_loss(logits, base, batch, settings)
            assert divergence_loss(spoiled, base, batch, settings) == loss
        first = dataclasses.replace(batch, answers=batch.answers.clone())
        for b in range(len(batch)):  # on the first real token of a row nothing predicts it
            first.answers[b, int(batch.attention_mask[b].nonzero()[0])] = True
        assert count("answer", first) == count("answer", batch)
        assert loss_of("answer", first, logits) == loss_of("answer", batch, logits)


def test_the_divergence_is_that_of_every_real_token() -> None:
    for batch in sides():
        student, base = logits_for(batch, 1), logits_for(batch, 2)
        real = batch.attention_mask.bool()
        for settings in (Distil(), Distil(divergence="reverse", temperature=3.0)):
            naive = naive_divergence(
                student[real].double(), base[real].double(), settings.divergence, settings.temperature
            )
            loss = divergence_loss(student, base, batch, settings)
            assert float(loss) == pytest.approx(float(naive.sum()), rel=1e-5)
        assert count("base_kl", batch) == count("distil", batch) == len(naive)
        settings = Distil(top_k=4, divergence="jensen_shannon")  # tokens of real tokens alone, as a cache has them
        top = TopK.of(base[real], 4)
        assert divergence_loss(student, top, batch, settings) == divergence_loss(student, base, batch, settings)


def test_attention_loss_is_the_logarithm_of_the_mass_on_gold() -> None:
    for tokenizer in TOKENIZERS:
        batch = batch_of(tokenizer=tokenizer)
        mine = [x.double().softmax(-1) for x in rows(batch, 3)]
        heads = []
        for layer, layer_reads in zip(mine, READS, strict=True):
            for h, read in enumerate(layer_reads):
                gold = getattr(batch, f"read_{read}")
                asked = (batch.read_query >= 0).nonzero().tolist()
                heads.append(sum(-math.log(layer[b, h, r, int(gold[b, r])]) for b, r in asked))
        assert float(loss_of("attention", batch, mine, reads=READS)) == pytest.approx(mean(heads), rel=1e-5)
        assert count("attention", batch) == len(asked)
    with pytest.raises(ValueError, match="zip"):
        loss_of("attention", batch, [*mine, mine[0]], reads=READS)


def on_gold(batch: EncodedBatch, gold_BR: Tensor, share: float) -> Tensor:
    """(B,1,R,T) rows that put `share` on the gold position and the rest on token 0."""
    rows_BRT = torch.zeros(*gold_BR.shape, batch.input_ids.shape[1], dtype=torch.float64)
    rows_BRT[..., 0] = 1 - share
    return rows_BRT.scatter_(2, gold_BR.clamp(min=0)[..., None], share)[:, None]


def test_which_reads_count() -> None:
    """A read without both gold positions does not; one whose gold position is the first token does."""
    batch = batch_of()
    cut = dataclasses.replace(batch, read_answer_token=batch.read_answer_token.clone())
    cut.read_answer_token[0, 0] = -1
    spoiled = on_gold(batch, batch.read_segment_end, 0.5)
    spoiled[0, :, 0] = 1e-3
    assert count("attention", cut) == count("attention", batch) - 1
    loss = float(loss_of("attention", cut, [spoiled], reads=[("segment_end",)]))
    assert loss == pytest.approx(count("attention", cut) * math.log(2), rel=1e-5)
    first = dataclasses.replace(batch, read_segment_end=batch.read_segment_end.clone())
    first.read_segment_end[0, 0] = 0
    mine = on_gold(first, first.read_segment_end, 0.5)
    mine[0, 0, 0, 0] = 0.25
    loss = float(loss_of("attention", first, [mine], reads=[("segment_end",)]))
    assert loss == pytest.approx((count("attention", batch) + 1) * math.log(2), rel=1e-5)
    none = float(loss_of("attention", batch, [on_gold(batch, batch.read_segment_end, 0.0)], reads=[("segment_end",)]))
    assert math.isfinite(none)


@pytest.mark.parametrize("gap", [30.0, 60.0])
def test_attention_far_from_gold_has_the_gradient_of_the_logarithm(gap: float) -> None:
    """By the scores it is a - gold. A head copied from an SSM head can begin with scores this far apart."""
    batch = encode(several_questions(), pico_tokenizer())
    gold = on_gold(batch, batch.read_answer_token, 1.0)
    scores = (torch.randn(gold.shape, generator=torch.Generator().manual_seed(0)) - gap * gold).requires_grad_()
    a = scores.softmax(-1)
    assert float((a * gold).detach().sum(-1).max()) < 1e-9
    included = (batch.read_query >= 0)[:, None, :, None]
    for loss in (
        loss_of("attention", batch, [a], reads=[("answer_token",)]),
        loss_of("attention_kl", batch, [a], [gold]),
    ):
        (gradient,) = torch.autograd.grad(loss, scores, retain_graph=True)
        torch.testing.assert_close(gradient, (a.detach() - gold) * included, atol=1e-7, rtol=1e-4)


def test_attention_kl_loss_is_the_divergence_of_the_reads_rows() -> None:
    """Against torch's own; padded reads do not count, and its gradient by the scores is a - a'."""
    for tokenizer in TOKENIZERS:
        batch = batch_of(tokenizer=tokenizer)
        asked = (batch.read_query >= 0).nonzero().tolist()
        scores, theirs = [x.requires_grad_() for x in rows(batch, 0)], [x.softmax(-1) for x in rows(batch, 1)]
        loss = loss_of("attention_kl", batch, [x.softmax(-1) for x in scores], theirs)
        heads = [
            sum(float(F.kl_div(a[d, h, q].log_softmax(-1), b[d, h, q], reduction="sum")) for d, q in asked)
            for a, b in zip(scores, theirs, strict=True)
            for h in range(a.shape[1])
        ]
        assert 0 < len(asked) < batch.read_query.numel() and count("attention_kl", batch) == len(asked)
        assert float(loss) == pytest.approx(mean(heads), rel=1e-5)
        included = (batch.read_query >= 0)[:, None, :, None]
        for leaf, gradient, other in zip(scores, torch.autograd.grad(loss, scores), theirs, strict=True):
            torch.testing.assert_close(gradient, (leaf.softmax(-1) - other) * included / 3, atol=1e-6, rtol=1e-4)


def test_distances_of_matrices_and_streams() -> None:
    """Of the causal rows and the vectors of real tokens."""
    for batch in sides():
        real = [row.nonzero()[:, 0] for row in batch.attention_mask]
        heads = []
        for a, b in zip(matrices(batch, 0), matrices(batch, 1), strict=True):
            for h in range(a.shape[1]):
                squares = (a[:, h] - b[:, h]).double().square()
                heads.append(
                    sum(float(squares[d, t, at[: i + 1]].sum()) for d, at in enumerate(real) for i, t in enumerate(at))
                )
        loss = loss_of("attention_mse", batch, matrices(batch, 0), matrices(batch, 1))
        assert float(loss) == pytest.approx(mean(heads), rel=1e-5)
        layers = [
            sum(float((a[d, t] - b[d, t]).double().norm()) for d, at in enumerate(real) for t in at)
            for a, b in zip(streams(batch, 0), streams(batch, 1), strict=True)
        ]
        loss = loss_of("hidden_mse", batch, streams(batch, 0), streams(batch, 1))
        assert float(loss) == pytest.approx(mean(layers), rel=1e-5)
        assert count("attention_mse", batch) == count("hidden_mse", batch) == sum(map(len, real))


def test_where_student_and_teacher_agree_the_gradient_is_zero_and_finite() -> None:
    batch = batch_of()
    for name, made in (("attention_mse", matrices), ("hidden_mse", streams)):
        mine = [x.requires_grad_() for x in made(batch, 0)]
        found = loss_of(name, batch, mine, [x.detach().clone() for x in mine])
        assert float(found.detach()) == 0 and all(bool((g == 0).all()) for g in torch.autograd.grad(found, mine))


def test_a_batch_without_terms_has_no_loss_which_still_depends_on_the_model() -> None:
    batch = encode(sample("sentence", 2), pico_tokenizer())
    logits, scores = logits_for(batch), rows(batch, 0)
    for leaves, loss in (
        ([logits], lambda: loss_of("answer", batch, logits)),
        (scores, lambda: loss_of("attention", batch, [x.softmax(-1) for x in scores], reads=READS)),
        (scores, lambda: loss_of("attention_kl", batch, [x.softmax(-1) for x in scores], rows(batch, 1))),
    ):
        for leaf in leaves:
            leaf.requires_grad_()
        found = loss()
        assert float(found.detach()) == 0 and found.requires_grad
