"""Counterfactual prompts: another prompt's answer in the place of the own one, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ProbeError
from surgery.locate.batches import counterfactuals
from surgery.locate.locating import locate_heads
from surgery.probes.registry import prompts_of
from surgery.recipe import Locate, Splice
from tests.support.cases import each
from tests.support.pico import pico_base, pico_tokenizer, prompts


def with_answers(*tokens: int, targets: Sequence[int] = ()) -> EncodedBatch:
    """Prompts whose values in the context begin with these tokens, and whose answers begin with the same or others."""
    batch = prompts([9 + i for i in range(len(tokens))])
    batch.input_ids[torch.arange(len(tokens)), batch.answer_token[:, 0]] = torch.tensor(tokens)
    batch.target[:, 0] = torch.tensor(targets or tokens)
    return batch


def at_answers(batch: EncodedBatch, ids: Tensor) -> list[int]:
    return ids[torch.arange(len(batch)), batch.of_last_question(batch.answer_token)].tolist()


@each(
    ("own", "others"),
    [([5, 6, 7], [6, 7, 5]), ([5, 5, 7], [7, 7, 5]), ([5, 7, 7], [7, 5, 5]), ([5, 6, 5, 5], [6, 5, 6, 6])],
)
def test_the_next_prompt_with_another_answer_gives_its_token(own: list[int], others: list[int]) -> None:
    batch = with_answers(*own)
    before = batch.input_ids.clone()
    (ids,) = counterfactuals([batch]) or ()
    assert at_answers(batch, ids) == others
    assert (ids != batch.input_ids).sum(1).eq(1).all() and torch.equal(batch.input_ids, before)


@each("own", [[5], [5, 5]])
def test_prompts_with_one_answer_take_that_of_another_choice(own: list[int]) -> None:
    batch = with_answers(*own, targets=[9] * len(own))
    batch.choice_ids[:, 0] = torch.tensor([5, 7, 8, 9, -1])
    (ids,) = counterfactuals([batch]) or ()
    assert at_answers(batch, ids) == [8] * len(own)


def test_there_are_none_without_other_answers_or_places() -> None:
    batch = with_answers(5, 6)
    batch.answer_token[1] = -1
    assert counterfactuals([batch]) is None and counterfactuals([]) is None
    same = with_answers(5, 5)
    same.choice_ids[:] = 5
    assert counterfactuals([same]) is None
    section = Locate(methods=("ablation", "patching", "sharpen"))
    with pytest.raises(ProbeError, match=r"locate.methods: patching. It needs prompts with different answers"):
        locate_heads(pico_base(), pico_tokenizer(), section, Splice(select="random"), batches=[same])


@each("options", [{}, {"value_digits": (3, 5)}, {"task": "records"}, {"task": "json_kv"}, {"task": "phonebook"}])
def test_the_prompts_of_probes_differ_at_the_value(options: Any) -> None:
    section, tokenizer = Locate(pairs=4, **options), pico_tokenizer()
    documents = prompts_of(section.probe, "locate", 0, 8, section.options(tokenizer=tokenizer))
    batch = encode(documents, tokenizer, padding_side="left", until_answer=True)
    (ids,) = counterfactuals([batch]) or ()
    for b, (own, other) in enumerate(zip(batch.input_ids, ids, strict=True)):
        assert (own != other).nonzero()[:, 0].tolist() == batch.answer_token[b, -1:].tolist()
