"""Planted heads are found: the measurements, the ranking and the roles against models whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from surgery.data.encoding import EncodedBatch
from surgery.data.ranking import ChoiceScores
from surgery.locate.locating import locate_heads
from surgery.locate.selection import rank
from surgery.models.hooks import record
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.recipe import Locate, Splice
from surgery.types import HeadId, ScoredHead
from tests.support.planted import Planted, answers, plant, planted_prompts, planted_tokenizer, scored_heads

PAIRS = 5
CHANCE = 1 / PAIRS


@cache
def prompts(seed: int, examples: int = 24) -> EncodedBatch:
    return planted_prompts(seed, examples, PAIRS)


def accuracy(scores: Sequence[ChoiceScores]) -> float:
    return float(torch.cat([s.correct for s in scores]).double().mean())


def best(heads: Sequence[ScoredHead], number: int, method: str = "ablation") -> set[HeadId]:
    return {s.head for s in rank(heads, method)[:number]}


def roles(heads: Sequence[ScoredHead]) -> dict[HeadId, str]:
    return {s.head: s.role for s in heads if s.role != "neither"}


def check_found(planted: Planted, batch: EncodedBatch) -> None:
    """The pair and nothing else: by margin, by role, and the Aggregate head is where a perfect read would help."""
    heads = scored_heads(planted.model, [batch])
    assert best(heads, 2) == set(planted.heads)
    assert roles(heads) == {planted.gather: "gather", planted.aggregate: "aggregate"}
    first = rank(heads, "sharpen")[0]
    assert (first.head, first.reads) == (planted.aggregate, "segment_end")
    assert best(heads, 1, "aggregate") == {planted.aggregate}
    assert best(heads, 1, "gather") == {planted.gather}
    decoy = next(s for s in heads if s.head == planted.decoy)
    assert abs(decoy.scores["ablation"].value) < 1e-3
    # Not zero: a read that is scaled differently changes the mean square of the gated norm, which heads share.
    assert decoy.scores[decoy.reads].value < first.scores[first.reads].value / 10


def test_the_pair_is_found() -> None:
    """In Mamba-2 with one group of B and C and with several, and in Mamba-1, whose heads are groups of channels."""
    for seed in range(3):
        check_found(plant(seed), prompts(seed))
    for groups in (2, 4):
        check_found(plant(groups, n_groups=groups), prompts(groups))
    check_found(plant(1, "mamba"), prompts(1))


def test_it_is_located_from_text() -> None:
    planted, section = plant(0), Locate(pairs=8, examples=32, batch_size=16)
    heads = locate_heads(planted.model, planted_tokenizer(), section, Splice(select="ablation", num_heads=2))
    assert {s.head for s in heads.chosen} == set(planted.heads)
    assert roles(heads.heads) == {planted.gather: "gather", planted.aggregate: "aggregate"}


def test_a_head_with_a_backup_is_found_by_margin() -> None:
    """The Aggregate head twice: accuracy does not see either, margin and role see both."""
    for seed in range(2):
        planted, batch = plant(seed, backup=True), prompts(seed)
        heads = scored_heads(planted.model, [batch])
        expected = {planted.gather: "gather", **dict.fromkeys(planted.aggregates, "aggregate")}
        assert best(heads, 3) == set(planted.heads) and roles(heads) == expected, seed
        clean = accuracy([answers(planted.model, batch)])
        for head in planted.aggregates:
            assert accuracy([answers(planted.model, batch, [head])]) > clean - 0.1, head
            assert next(s for s in heads if s.head == head).scores["ablation"].low > 0, head
    found = [answers(p.model, prompts(s), p.aggregates) for s in range(6) for p in (plant(s, backup=True),)]
    assert abs(accuracy(found) - CHANCE) < 0.1  # 144 prompts: three standard errors


def test_the_heads_do_what_their_names_say() -> None:
    """By their hidden attention, weighted with what they hold."""
    batch = prompts(1)
    for groups in (1, 4):
        planted = plant(1, n_groups=groups)
        for head in [planted.aggregate, planted.decoy] if groups == 1 else [planted.aggregate]:
            row_BT = read(planted, batch, head)[:, -1]
            assert (row_BT.argmax(-1) == batch.segment_end[:, 0]).double().mean() > 0.8, (groups, head)
    planted = plant(1)
    row_BT = read(planted, batch, planted.gather)[torch.arange(len(batch)), batch.segment_end[:, 0]]
    place_T = torch.arange(row_BT.shape[-1])
    own_BT = (place_T >= batch.segment_start) & (place_T <= batch.segment_end)
    assert ((row_BT * own_BT).sum(-1) / row_BT.sum(-1)).min() > 0.9


@torch.no_grad()
def read(planted: Planted, batch: EncodedBatch, head: HeadId) -> torch.Tensor:
    """(B,T,T) |a[t,s]| |x_s| of one head of an unpadded batch."""
    spec = family_of(planted.model.config).mixers(planted.model.config)[head.layer]
    mixer, structure = mixer_of(planted.model, spec), structure_of(spec)
    with record(planted.model, [spec]) as trace:
        planted.model(batch.input_ids)
    streams = structure.streams(mixer, spec, trace.projected[spec.name])
    weights_BTT = structure.hidden_attention(mixer, spec, streams)[:, head.head].abs()
    return weights_BTT * streams.x[:, :, head.head].norm(dim=-1)[:, None]
