"""Choices of several tokens: what is decoded, and that it scores them as one whole pass for each does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from surgery.data.encoding import encode
from surgery.errors import ProbeError
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.scoring.choices import Paths, paths_of, scored_choices
from surgery.scoring.ranking import answer_choices, choice_scores
from tests.support.long_choices import digit_tokenizer, long_prompts, margins, whole_passes
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, prompts

MODELS = {name: partial(pico_family, name) for name in FAMILY_NAMES}
MODELS["hybrid"] = lambda: pico_hybrid([pico_site(0, [1, 3])])


def dictionaries(count: int = 6) -> list[Document]:
    """Of different lengths; the last ones ask three questions each."""
    return [kv_document(rng_of("long", i), 6 + 5 * i, questions=1 + 2 * (i > 3)) for i in range(count)]


def paths(most: int) -> Paths:
    found = paths_of(long_prompts(most))
    assert found is not None
    return found


@pytest.mark.parametrize("most", [2, 3, 4])
def test_every_choice_is_predicted_from_its_own_prompt_and_tokens(most: int) -> None:
    found = paths(most)
    B, K, _ = found.choices.shape
    for b in range(B):
        for k in range(K):
            begun = found.choices[b, k][found.choices[b, k] >= 0][:-1]
            if len(begun):
                path = int(found.of_choice[b, k])
                assert found.owner[path] == b
                assert found.real[path, : len(begun)].all() and torch.equal(found.ids[path, : len(begun)], begun)


@pytest.mark.parametrize("most", [2, 3, 4])
def test_nothing_is_decoded_twice(most: int) -> None:
    """No path of a prompt begins another, and each is the beginning of some choice."""
    found = paths(most)
    rows = [(int(o), *row[real].tolist()) for o, row, real in zip(found.owner, found.ids, found.real, strict=True)]
    assert all(a[: len(b)] != b for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j)
    for b, *path in rows:
        assert any(choice[: len(path)].tolist() == path for choice in found.choices[b])
    assert set(found.owner.tolist()) == {0, 2, 3}, "one prompt's choices are single tokens"


def test_ten_first_digits_for_a_hundred_numbers() -> None:
    batch = encode([kv_document(rng_of(0), 100)], digit_tokenizer(), "left", until_answer=True)
    found = paths_of(batch)
    assert found is not None and len(found) == 10 and found.ids.shape[1] == 1
    assert paths_of(prompts()) is None


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_whole_pass_for_each_choice(name: str, most: int) -> None:
    """Left-padded, all paths together or one at a time."""
    model, batch = MODELS[name](), long_prompts(most)
    expected = whole_passes(model, batch)
    for memory in (2**29, 1):
        torch.testing.assert_close(scored_choices(model, batch, paths(most), memory), expected, atol=1e-4, rtol=0)
    assert expected[expected > -torch.inf].std() > 0.1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return pico_base(vocab_size=1024, layers=2)


def test_answers_are_those_of_the_whole_text(model: PreTrainedModel) -> None:
    documents = dictionaries()
    found = answer_choices(model, digit_tokenizer(), documents, 4)
    for row, document in enumerate(documents):
        batch = encode([document], digit_tokenizer(), "left", until_answer=True)
        expected = margins(whole_passes(model, batch), batch)
        torch.testing.assert_close(found.margin[row : row + 1], expected, atol=1e-4, rtol=0)


def test_answers_do_not_depend_on_the_batch_size(model: PreTrainedModel) -> None:
    one, other = (answer_choices(model, digit_tokenizer(), dictionaries(), size) for size in (1, 6))
    torch.testing.assert_close(one.margin, other.margin, atol=1e-4, rtol=0)
    assert torch.equal(one.correct, other.correct)


def test_one_step_does_not_score_them() -> None:
    batch = long_prompts()
    with pytest.raises(ProbeError, match="several tokens"):
        choice_scores(torch.zeros(len(batch), 61), batch)
