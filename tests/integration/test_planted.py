"""Planted heads are found: the measurements, the ranking and the roles against models whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from surgery.data.encoding import EncodedBatch
from surgery.interventions.hooks import record
from surgery.locate.locating import locate_heads
from surgery.locate.selection import rank
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import rng_of
from surgery.recipe import Locate, Splice
from surgery.scoring.ranking import ChoiceScores
from surgery.types import HeadId, ScoredHead
from tests.support.planted import (
    Planted,
    answers,
    head_ids,
    plant,
    planted_prompts,
    planted_tokenizer,
    scored_heads,
)

SEEDS = range(12)
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


def check_found(planted: Planted, heads: Sequence[ScoredHead]) -> None:
    """The pair and nothing else: by margin, by role, and the Aggregate head is where a perfect read would help."""
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


class TestMamba2:
    @pytest.mark.parametrize("seed", SEEDS[:5])
    def test_found(self, seed: int) -> None:
        planted = plant(seed)
        check_found(planted, scored_heads(planted.model, [prompts(seed)]))

    @pytest.mark.parametrize("n_groups", [2, 4])
    def test_found_with_groups(self, n_groups: int) -> None:
        planted = plant(n_groups, n_groups=n_groups)
        check_found(planted, scored_heads(planted.model, [prompts(n_groups)]))

    def test_what_retrieval_hangs_on(self) -> None:
        """Over all seeds: chance without the pair; nothing is lost without two others, or with the pair alone."""
        found: dict[str, list[ChoiceScores]] = {}
        for seed in SEEDS:
            planted, batch = plant(seed), prompts(seed)
            others = [h for h in head_ids(planted.model) if h not in planted.heads]
            two = rng_of("two", seed).sample(others, 2)
            for arm, off in (("clean", ()), ("pair", planted.heads), ("two", two), ("others", others)):
                found.setdefault(arm, []).append(answers(planted.model, batch, off))
        reached = {arm: accuracy(scores) for arm, scores in found.items()}
        assert reached["clean"] > 0.9
        assert abs(reached["pair"] - CHANCE) < 0.06  # 480 prompts: three standard errors are 0.055
        assert max(accuracy([s]) for s in found["pair"]) < 0.55
        assert abs(reached["two"] - reached["clean"]) < 0.02
        assert reached["others"] > reached["clean"] - 0.01

    def test_either_of_the_pair_is_needed(self) -> None:
        found = [answers(p.model, prompts(0), [head]) for p in (plant(0),) for head in p.heads]
        assert all(accuracy([s]) < 0.5 for s in found)

    def test_located_from_text(self) -> None:
        planted, section = plant(0), Locate(pairs=8, examples=32, batch_size=16)
        heads = locate_heads(planted.model, planted_tokenizer(), section, Splice(select="ablation", num_heads=2))
        assert {s.head for s in heads.chosen} == set(planted.heads)
        assert roles(heads.heads) == {planted.gather: "gather", planted.aggregate: "aggregate"}


class TestBackup:
    """The Aggregate head twice: accuracy does not see either, the margin sees both."""

    @pytest.mark.parametrize("seed", range(3))
    def test_found_by_margin(self, seed: int) -> None:
        planted, batch = plant(seed, backup=True), prompts(seed)
        heads = scored_heads(planted.model, [batch])
        assert best(heads, 3) == set(planted.heads)
        assert roles(heads) == {planted.gather: "gather"}
        clean = accuracy([answers(planted.model, batch)])
        for head in planted.aggregates:
            assert accuracy([answers(planted.model, batch, [head])]) > clean - 0.1
            assert next(s for s in heads if s.head == head).scores["ablation"].low > 0

    def test_both_off(self) -> None:
        found = [answers(p.model, prompts(s), p.aggregates) for s in range(8) for p in (plant(s, backup=True),)]
        assert abs(accuracy(found) - CHANCE) < 0.09  # 192 prompts: three standard errors


class TestMamba1:
    """A head is a group of channels."""

    def test_found(self) -> None:
        planted = plant(1, "mamba")
        check_found(planted, scored_heads(planted.model, [prompts(1)]))

    def test_what_retrieval_hangs_on(self) -> None:
        found: dict[str, list[ChoiceScores]] = {}
        for seed in range(5):
            planted, batch = plant(seed, "mamba"), prompts(seed, 16)
            others = [h for h in head_ids(planted.model) if h not in planted.heads]
            for arm, off in (("clean", ()), ("pair", planted.heads), ("others", others)):
                found.setdefault(arm, []).append(answers(planted.model, batch, off))
        reached = {arm: accuracy(scores) for arm, scores in found.items()}
        assert reached["clean"] > 0.9
        assert abs(reached["pair"] - CHANCE) < 0.14  # 80 prompts: three standard errors
        assert reached["others"] > reached["clean"] - 0.03


class TestWhatWasPlanted:
    """The heads do what their names say, by their hidden attention weighted with what they hold."""

    @pytest.mark.parametrize("n_groups", [1, 4])
    def test_aggregate_and_decoy_read_the_gold_segment(self, n_groups: int) -> None:
        planted, batch = plant(1, n_groups=n_groups), prompts(1)
        heads = [planted.aggregate, planted.decoy] if n_groups == 1 else [planted.aggregate]
        for head in heads:
            row_BT = read(planted, batch, head)[:, -1]
            assert (row_BT.argmax(-1) == batch.segment_end[:, 0]).double().mean() > 0.8

    def test_gather_holds_its_own_line(self) -> None:
        planted, batch = plant(1), prompts(1)
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
