"""Methods that train candidates: the schedule, the zero start, the frozen base, and what arrives in `heads.json`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from bench.plugins.scaling import gated
from bench.plugins.trials import Gates, Trial
from bench.plugins.trials.gates import HardConcrete
from bench.plugins.trials.halving import Trials
from bench.plugins.trials.training import TrialPrompts, splice_candidates, trial_loss
from surgery.errors import PlanError, RecipeError
from surgery.locate.locating import locate_heads
from surgery.locate.methods import METHODS, Candidates, TrainedScores
from surgery.locate.selection import rank
from surgery.models.runtime import requires_grad
from surgery.probes.words import key_words
from surgery.recipe import Locate, Recipe, Splice
from surgery.report.figures.heatmaps import head_maps
from surgery.report.heads_page import write_csv, write_page
from surgery.types import HeadId, ScoredHead, head_set_from_json, to_json
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer, tokens
from tests.support.planted import plant, planted_tokenizer

SECTION = Locate(
    methods=("gates", "trial"),
    pairs=4,
    examples=6,
    batch_size=3,
    method_options={
        "gates": Gates(steps=4, rows=2, candidates=3),
        "trial": Trial(steps=1, rows=2, candidates=3),
    },
)
GATES, TRIAL = SECTION.method_options["gates"], SECTION.method_options["trial"]
HEADS = ("L0H1", "L1H0", "L1H2")


def model() -> Any:
    return pico_base(vocab_size=1024, layers=2)


def candidates(base: Any = None, seed: int = 0, tick: Callable[[], None] = lambda: None, **section: Any) -> Candidates:
    base = model() if base is None else base
    heads = tuple(ScoredHead(HeadId.parse(name), "neither", "segment_end", {}) for name in HEADS)
    splice = section.pop("splice", Splice())
    whole = section_with(**section)
    return Candidates(base, pico_tokenizer(), heads, whole, splice, seed, whole.examples, tick)


def section_with(**update: Any) -> Locate:
    """`SECTION` with other keys, or other options of `gates` or `trial`."""
    options = {**SECTION.method_options, **{name: update.pop(name) for name in ("gates", "trial") if name in update}}
    return SECTION.model_copy(update={**update, "method_options": options})


def same(one: TrainedScores, other: TrainedScores) -> bool:
    if one.chosen != other.chosen or one.columns.keys() != other.columns.keys():
        return False
    pairs = [(column, other.columns[name]) for name, column in one.columns.items()]
    return all(a.keys() == b.keys() and all(np.array_equal(a[head], b[head]) for head in a) for a, b in pairs)


class TestSchedule:
    @pytest.mark.parametrize(
        ("heads", "keep", "rounds"),
        [
            (12, 1, [(12, 8), (6, 16), (3, 32), (2, 64)]),
            (12, 4, [(12, 8), (6, 16)]),
            (5, 2, [(5, 8), (3, 16)]),
            (2, 1, [(2, 8)]),
            (4, 4, [(4, 8)]),
            (1, 1, [(1, 8)]),
        ],
    )
    def test_half_of_the_heads_and_twice_the_steps(self, heads: int, keep: int, rounds: list[tuple[int, int]]) -> None:
        assert Trial(steps=8).rounds(heads, keep) == rounds

    @pytest.mark.parametrize("greedy", [False, True])
    def test_the_announced_steps_are_taken(self, greedy: bool) -> None:
        ticks: list[int] = []
        trial = TRIAL.model_copy(update={"greedy": greedy})
        given = candidates(tick=lambda: ticks.append(1), trial=trial, splice=Splice(num_heads=2))
        scores = METHODS["trial"].measure(given)
        assert len(ticks) == trial.num_steps(3, 2) == scores.steps > 0


class TestFrozenBase:
    @pytest.mark.parametrize("method", ["gates", "trial"])
    def test_nothing_of_the_base_changes(self, method: str) -> None:
        base = model()
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        flags = [p.requires_grad for p in base.parameters()]
        METHODS[method].measure(candidates(base))
        assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
        assert flags == [p.requires_grad for p in base.parameters()] and not base.training
        assert all(p.grad is None for p in base.parameters())

    def test_gates_start_at_the_base_bit_for_bit(self) -> None:
        base, ids = model(), tokens()
        hybrid, plan = splice_candidates(candidates(base), candidates(base).heads, "add")
        gates = HardConcrete(plan, torch.device("cpu"), 0)
        assert [str(head) for head in plan.heads] == list(HEADS)
        with torch.no_grad(), requires_grad(False, base, hybrid):
            expected = base(ids, use_cache=False).logits
            for opened in (gates.sample(len(ids)), gates.values()):
                with gated(hybrid, opened):
                    assert torch.equal(hybrid(ids, use_cache=False).logits, expected)

    def test_only_branches_train(self) -> None:
        given = candidates()
        hybrid, plan = splice_candidates(given, given.heads)
        trial_loss(hybrid, plan, TrialPrompts("trial", given, 2).step(0)).backward()
        with_gradient = {name for name, p in hybrid.named_parameters() if p.grad is not None}
        assert with_gradient and all(".attention." in name for name in with_gradient)

    def test_training_in_parts_is_training(self) -> None:
        given = candidates()
        whole, parts = Trials(given), Trials(given)
        once = whole.train(given.heads[:2], 4)
        twice = parts.train(given.heads[:2], 4, parts.train(given.heads[:2], 2))
        assert all(torch.equal(a, b) for a, b in zip(once.parameters, twice.parameters, strict=True))
        assert np.array_equal(once.answers, twice.answers) and whole.steps == parts.steps == 4
        assert not np.array_equal(once.answers, whole.train(given.heads[:2], 2).answers)


class TestPrompts:
    def test_no_key_of_the_evaluation_split(self) -> None:
        planted, tokenizer = plant(0, train=True), planted_tokenizer(train=True)
        given = replace(candidates(planted.model), tokenizer=tokenizer)
        prompts = TrialPrompts("gates", given, 8)
        ids = {
            int(i) for batch in (prompts.step(0), prompts.step(1), *prompts.held_out) for i in batch.input_ids.flatten()
        }
        known = {split: set(tokenizer.convert_tokens_to_ids(list(key_words(split)))) for split in ("train", "eval")}
        assert ids & known["train"] and not ids & known["eval"] and tokenizer.unk_token_id not in known["train"]

    def test_held_out_prompts_are_not_those_of_training(self) -> None:
        prompts = TrialPrompts("gates", candidates(), 4)
        trained = {tuple(row) for step in range(4) for row in prompts.step(step).input_ids[:, :20].tolist()}
        assert not trained & {tuple(row) for batch in prompts.held_out for row in batch.input_ids[:, -20:].tolist()}
        assert sum(map(len, prompts.held_out)) == 6


class TestScore:
    def test_log_probability_among_the_choices(self) -> None:
        base, given = model(), candidates()
        prompts = TrialPrompts("trial", given, 2)
        expected = []
        for batch in prompts.held_out:
            with torch.no_grad():
                logits = base(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits[:, -1]
            for row, choices, gold in zip(logits, batch.choice_ids[:, 0], batch.gold[:, 0], strict=True):
                expected.append(float(row[choices].log_softmax(-1)[gold]))
        np.testing.assert_allclose(prompts.log_probabilities(base), expected, atol=1e-5)


class TestGates:
    def test_a_gate_scales_its_head_alone(self) -> None:
        hybrid, ids = pico_hybrid([pico_site(0, [1]), pico_site(1, [0, 2])]), tokens()

        def logits(gates: dict[int, list[list[float]]]) -> torch.Tensor:
            with torch.no_grad(), gated(hybrid, {layer: torch.tensor(rows) for layer, rows in gates.items()}):
                return hybrid(ids, use_cache=False).logits

        with torch.no_grad():
            plain, base = hybrid(ids, use_cache=False).logits, pico_base()(ids, use_cache=False).logits
        torch.testing.assert_close(logits({0: [[1.0]], 1: [[1.0, 1.0]]}), plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits({0: [[0.0]], 1: [[0.0, 0.0]]}), base, atol=1e-5, rtol=1e-5)
        one, other = logits({1: [[0.0, 1.0]]}), logits({1: [[1.0, 0.0]]})
        assert not torch.allclose(one, other, atol=1e-3) and not torch.allclose(one, plain, atol=1e-3)
        by_row = logits({1: [[0.0, 1.0]] + [[1.0, 0.0]] * (len(ids) - 1)})
        torch.testing.assert_close(by_row[0], one[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(by_row[1:], other[1:], atol=1e-5, rtol=1e-5)

    def test_a_cost_closes_gates(self) -> None:
        probability = {}
        for cost in (0.0, 100.0):
            gates = GATES.model_copy(update={"cost": cost, "steps": 24, "gate_lr": 0.3})
            scores = METHODS["gates"].measure(candidates(gates=gates))
            probability[cost] = [float(values[0]) for values in scores.columns["gate"].values()]
            if cost:
                assert all(not values.any() for values in scores.columns["gates"].values()), "closed gates score 0"
        assert max(probability[100.0]) < 0.5 < min(probability[0.0])


class TestDeterminism:
    @pytest.mark.parametrize("method", ["gates", "trial"])
    def test_a_seed_gives_one_result(self, method: str) -> None:
        one, again, other = (METHODS[method].measure(candidates(seed=seed)) for seed in (0, 0, 1))
        assert same(one, again) and not same(one, other)
        assert one.passes == again.passes > 0

    def test_greedy_chooses_in_addition_to_the_chosen(self) -> None:
        trial = TRIAL.model_copy(update={"greedy": True})
        scores = METHODS["trial"].measure(candidates(trial=trial, splice=Splice(num_heads=3)))
        heads = [s.head for s in scores.chosen]
        assert sorted(map(str, heads)) == list(HEADS)
        assert [list(s.given) for s in scores.chosen] == [heads[:i] for i in range(3)]
        assert list(scores.columns["trial_given"]) == heads[1:] and len(scores.columns["trial"]) == 3


class TestLocate:
    @pytest.mark.parametrize("select", ["gates", "trial"])
    def test_its_columns_rank_and_choose(self, select: str, tmp_path: Path) -> None:
        steps: list[tuple[int, int]] = []
        heads = locate_heads(
            model(),
            pico_tokenizer(),
            SECTION,
            Splice(select=select, num_heads=2),
            any_accuracy=True,
            progress=lambda *at: steps.append(at),
        )
        tried = [s for s in heads.heads if select in s.scores]
        assert len(tried) == 3 and heads.heads[:3] == tuple(tried) and heads.chosen == heads.heads[:2]
        oracle = rank(heads.heads, "sharpen")
        assert {s.head for s in tried} == {s.head for s in oracle[:3]}, "the oracle read chooses the candidates"
        assert [s.head for s in heads.heads[3:]] == [s.head for s in oracle[3:]]
        assert all(s.reads is not None and {i.n for i in s.scores.values()} == {6} for s in heads.heads)
        assert steps[-1][0] == steps[-1][1] == len(steps)
        assert {f"{select}_seconds", f"{select}_passes", f"{select}_steps"} <= heads.cost.keys()
        assert heads.cost["passes"] > heads.cost["gates_passes"] + heads.cost["trial_passes"]
        assert head_set_from_json(to_json(heads)) == heads
        write_csv(heads, tmp_path / "heads.csv")
        write_page(heads, [], tmp_path / "locate.html")
        head_maps(heads, tmp_path)
        header, *rows = (tmp_path / "heads.csv").read_text().splitlines()
        assert {"gates", "gate", "trial", "trial_steps"} <= set(header.split(",")) and len(rows) == 8

    def test_a_ranking_of_candidates_is_measured(self) -> None:
        with pytest.raises(ValidationError, match=r"`gates.candidates_by: aggregate` needs `query` in `methods`"):
            Locate(methods=("gates",), method_options={"gates": {"candidates_by": "aggregate"}})
        with pytest.raises(ValidationError, match=r"Unknown way to select heads"):
            Gates(candidates_by="trial")
        section = SECTION.model_copy(update={"methods": ("gates", "query")})
        with pytest.raises(RecipeError, match=r"locate.methods: gates. It needs sharpen. Add it"):
            locate_heads(model(), pico_tokenizer(), section, Splice(select="gates"))

    def test_more_heads_than_candidates_are_refused(self) -> None:
        with pytest.raises(
            PlanError, match=r"splice.num_heads: 4. Set locate.method_options.gates.candidates to 4 or more"
        ):
            locate_heads(model(), pico_tokenizer(), SECTION, Splice(select="gates", num_heads=4))


class TestRecipe:
    def test_sharpen_is_added(self) -> None:
        assert Locate(methods=("gates",)).methods == ("gates", "sharpen")
        assert Locate(methods=("sharpen", "trial")).methods == ("sharpen", "trial")
        assert Locate(methods=("ablation",)).methods == ("ablation",)

    def test_copies_of_a_teacher_cannot_be_tried(self) -> None:
        splice = {"select": "sharpen", "init": "teacher", "teacher": {"model": "teacher"}}
        base = {
            "name": "x",
            "base": {"model": "base"},
            "train": {"sources": [{"task": "kv_retrieval", "pairs": [4, 8], "rows": 4, "weights": {"answer": 1.0}}]},
        }
        with pytest.raises(ValueError, match=r"locate.methods: gates cannot train copies of a teacher"):
            Recipe.model_validate({**base, "splice": splice, "locate": {"methods": ["gates"]}})
        with pytest.raises(RecipeError, match=r"locate.methods: trial. It cannot train copies of a teacher"):
            section = SECTION.model_copy(update={"methods": ("trial", "sharpen")})
            locate_heads(model(), pico_tokenizer(), section, Splice.model_validate(splice))


def test_options_are_checked_when_the_recipe_is_read() -> None:
    for options, words in (
        ({"gates": {"steps": 0}}, "gates.steps: Input should be greater than 0. Keys: candidates, "),
        ({"gates": {"stops": 1}}, "gates.stops: Extra inputs are not permitted. Keys: candidates, "),
        ({"query": {}}, "The method query has no options"),
        ({"trial": {}}, "`method_options` has options of trial: add it to `methods`"),
    ):
        with pytest.raises(ValidationError, match=re.escape(words)):
            Locate(methods=("gates",), method_options=options)
    section = Locate(methods=("gates",), method_options={"gates": {"steps": 3}})
    assert section.options_of("gates") == Gates(steps=3) and section.options_of("query") is None
    assert Locate.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(("method", "seed", "n_groups"), [("gates", 4, 4), ("trial", 0, 1)])
def test_the_planted_aggregate_head_is_chosen(method: str, seed: int, n_groups: int) -> None:
    """Without the decoy: a branch copies the same rows of it as of the Aggregate head."""
    planted, tokenizer = plant(seed, n_groups=n_groups, train=True, decoy=False), planted_tokenizer(train=True)
    budgets = {"gates": {"steps": 24, "candidates": 4}, "trial": {"steps": 16, "candidates": 3}}
    section = Locate(methods=(method,), pairs=12, examples=32, method_options={method: {**budgets[method], "rows": 8}})
    chosen = locate_heads(planted.model, tokenizer, section, Splice(select=method), any_accuracy=True).chosen[0]
    assert chosen.head == planted.aggregate and chosen.scores[method].low > 0
