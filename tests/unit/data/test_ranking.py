"""Choices of one token and of several, and perplexity, against naive loops; padding and batch size do not matter."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from surgery.data.choice_scores import Paths, paths_of, scored_choices
from surgery.data.encoding import encode
from surgery.data.generation import answer_batches, generate_answers
from surgery.data.ranking import LARGEST, answer_choices, choice_scores, perplexity
from surgery.errors import ModelError, ProbeError
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from tests.support.long_choices import digit_tokenizer, long_prompts, margins, whole_passes
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer
from tests.support.samples import ASKING, sample, several_questions

V = 1024
ASKED: list[Document] = [*several_questions(), *(d for task in ASKING for d in sample(task, 1))]
MODELS = {name: partial(pico_family, name) for name in FAMILY_NAMES}
MODELS["hybrid"] = lambda: pico_hybrid([pico_site(0, [1, 3])])
PLAIN: list[Document] = [*sample("sentence", 5), *sample("statement", 3)]


def test_only_choices_compete_and_a_tie_is_not_correct() -> None:
    batch = encode(ASKED, pico_tokenizer(), "left", until_answer=True)
    logits = torch.full((len(ASKED), V), 100.0)
    for row, document in enumerate(ASKED):
        last = len(document.questions) - 1
        ids = batch.choice_ids[row, last, : len(document.questions[last].choices)]
        logits[row, ids] = 0.0
        logits[row, batch.target[row, last]] = 1.0
    scores = choice_scores(logits, batch)
    assert scores.correct.all()
    assert torch.allclose(scores.margin, torch.ones(len(ASKED)))
    assert not choice_scores(torch.zeros(len(ASKED), V), batch).correct.any()


def dictionaries(count: int = 6) -> list[Document]:
    """Of different lengths; the last ones ask three questions each."""
    return [kv_document(rng_of("long", i), 6 + 5 * i, questions=1 + 2 * (i > 3)) for i in range(count)]


def paths(most: int) -> Paths:
    found = paths_of(long_prompts(most))
    assert found is not None
    return found


def test_nothing_is_decoded_twice() -> None:
    """What is decoded are the beginnings of choices, without those that begin another one."""
    for most in (2, 3, 4):
        found = paths(most)
        begun = {(b, *choice[choice >= 0][:-1].tolist()) for b, of_row in enumerate(found.choices) for choice in of_row}
        needed = [a for a in begun if len(a) > 1 and not any(a != b and a == b[: len(a)] for b in begun)]
        rows = [(int(o), *row[real].tolist()) for o, row, real in zip(found.owner, found.ids, found.real, strict=True)]
        assert sorted(rows) == sorted(needed)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_whole_pass_for_each_choice(name: str) -> None:
    """Left-padded, all paths together or one at a time."""
    model, batch = MODELS[name](), long_prompts(3)
    expected = whole_passes(model, batch)
    for memory in (2**29, 1):
        torch.testing.assert_close(scored_choices(model, batch, paths(3), memory), expected, atol=1e-4, rtol=0)
    assert expected[expected > -torch.inf].std() > 0.1


def test_answers_are_those_of_the_whole_text() -> None:
    """Whatever the batch size."""
    model = pico_hybrid([pico_site(1)], vocab_size=1024, layers=2)
    for tokenizer, documents in ((digit_tokenizer(), dictionaries()), (pico_tokenizer(), ASKED)):
        found, alone = (answer_choices(model, tokenizer, documents, size) for size in (4, 1))
        assert torch.equal(alone.correct, found.correct)
        for row, document in enumerate(documents):
            batch = encode([document], tokenizer, "left", until_answer=True)
            expected = margins(whole_passes(model, batch), batch)
            for scores in (found, alone):
                torch.testing.assert_close(scores.margin[row : row + 1], expected, atol=1e-4, rtol=0)


def test_one_step_does_not_score_them() -> None:
    batch = long_prompts()
    with pytest.raises(ProbeError, match="several tokens"):
        choice_scores(torch.zeros(len(batch), 61), batch)


def naive_perplexity(model: PreTrainedModel, documents: list[Document]) -> float:
    found: list[float] = []
    for document in documents:
        ids = torch.tensor(pico_tokenizer()(document.text)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0].double()
        for t in range(1, len(ids)):
            found.append(float(torch.logsumexp(logits[t - 1], 0) - logits[t - 1, ids[t]]))
    return math.exp(sum(found) / len(found))


def test_perplexity_is_that_of_every_document_alone() -> None:
    for model in (pico_base(vocab_size=V, layers=2), pico_hybrid([pico_site(1)], vocab_size=V, layers=2)):
        expected = naive_perplexity(model, PLAIN)
        for batch_size in (1, 3, 64):
            assert perplexity(model, pico_tokenizer(), PLAIN, batch_size) == pytest.approx(expected, rel=1e-4)


def test_a_diverged_model_has_the_largest_perplexity() -> None:
    """Losses of 709 and more have no perplexity that a number holds, infinite ones neither."""
    for factor in (1e3, 1e30):
        model = pico_base(vocab_size=V, layers=1)
        model.lm_head.weight.data.mul_(factor)
        assert perplexity(model, pico_tokenizer(), PLAIN, 4) == LARGEST


@pytest.mark.parametrize("broken", ["weight", "overflow"])
def test_logits_that_are_no_numbers_are_refused(broken: str) -> None:
    """Whether a weight is NaN, or finite ones overflow: no answer is called wrong, no loss a number."""
    model = pico_base(vocab_size=V, layers=2)
    if broken == "weight":
        model.backbone.layers[1].mixer.norm.weight.data[3] = math.nan
    else:
        model.backbone.norm_f.weight.data.mul_(1e20)
        model.lm_head.weight.data.mul_(1e30)
    batches = answer_batches(ASKED, pico_tokenizer(), 4)
    scores = [
        lambda: answer_choices(model, pico_tokenizer(), ASKED, 4),
        lambda: generate_answers(model, pico_tokenizer(), ASKED, batches),
    ]
    if broken == "weight":  # an infinite loss is the largest
        scores.append(lambda: perplexity(model, pico_tokenizer(), PLAIN, 4))
    for score in scores:
        with pytest.raises(ModelError, match=r"base\.model: the logits of .* are NaN or infinite"):
            score()
