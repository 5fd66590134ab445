"""The study of head choice: arms, regret and tables from made-up answers, and an interrupted run of a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Mamba2ForCausalLM

from bench.common import load
from bench.studies.head_choice import choosers as choosers_module
from bench.studies.head_choice import mamba1, study
from bench.studies.head_choice.arms import (
    COLUMNS,
    LAYER,
    NO_SPLICE,
    SHORT,
    Budget,
    Choices,
    arm_of,
    arms_of,
)
from bench.studies.head_choice.bases import BASES, StudyBase
from bench.studies.head_choice.choosers import CHOOSERS, Chooser
from bench.studies.head_choice.regret import Results, best_accuracy, regrets
from bench.studies.head_choice.tables import tables
from bench.studies.site_selection.tables import tables_on
from surgery.files.atomic import read_json, write_json
from surgery.models.lookup import family_of
from tests.integration.conftest import PICO_MAMBA2 as BASE

TOY = Budget(
    steps=2, warmup=1, rows=2, keep_rows=2, pairs=(4, 5), evaluate_pairs=(6,), examples=8, sentences=2,
    locate_examples=16,
)  # fmt: skip


def choice(*ranking: str) -> dict[str, Any]:
    """A chooser's entry, as `measure` writes it. Its other heads are those of layer 1."""
    heads = [*ranking, *(f"L1H{head}" for head in range(8) if f"L1H{head}" not in ranking)]
    columns = {column: heads[: int(column)] for column in COLUMNS if column != LAYER}
    whole = [f"{ranking[0].split('H')[0]}H{head}" for head in range(8)]
    return {"heads": {**columns, LAYER: whole}, "scores": {}, "cpu_seconds": 1.0, "passes": 0.0}


def made_up_choices(rankings: Mapping[str, tuple[str, ...]], default: tuple[str, ...] = ("L0H1", "L0H2")) -> Choices:
    """All choosers rank as `default`, unless listed."""
    choosers = {name: choice(*rankings.get(name, default)) for name in CHOOSERS}
    gains = {"segment_end": -0.5, "answer_token": -1.0}  # both lose, so the answer token is read
    choosers["oracle"]["scores"] = {f"L{layer}H{head}": gains for layer in range(2) for head in range(8)}
    return {"base": "shipped", "seed": 0, "choosers": choosers, "clean": 0.7}


def right(count: int, of: int = 100, start: int = 0) -> np.ndarray[Any, Any]:
    """Answers with this many right ones, from index `start` on."""
    answers = np.zeros(of)
    answers[start : start + count] = 1
    return answers


class TestArms:
    def test_choosers_with_the_same_set_share_an_arm_whatever_the_order(self) -> None:
        choices = made_up_choices({"greedy": ("L0H2", "L0H1"), "random": ("L1H3", "L0H1")})
        assert [arm.heads for arm in arms_of(choices, "shipped", 0, "1")] == [(), ("L0H1",), ("L0H2",), ("L1H3",)]
        assert [arm.heads for arm in arms_of(choices, "shipped", 0, "2")] == [("L0H1", "L0H2"), ("L0H1", "L1H3")]
        one, other = (arm_of(choices, "shipped", 0, heads) for heads in (("L0H2", "L0H1"), ("L0H1", "L0H2")))
        assert one == other and one.identity(TOY, "r") == other.identity(TOY, "r")

    def test_identity_depends_on_base_seed_heads_budget_and_weights(self) -> None:
        choices = made_up_choices({})
        arm = arm_of(choices, "shipped", 0, ["L0H1"])
        others = [
            arm_of(choices, *x) for x in (("far", 0, ["L0H1"]), ("shipped", 1, ["L0H1"]), ("shipped", 0, ["L0H2"]))
        ]
        keys = [a.identity(TOY, "r") for a in (arm, *others)]
        keys += [arm.identity(budget, "r") for budget in (SHORT, replace(TOY, filler=(0, 6)), replace(TOY, kept=()))]
        assert len({*keys, arm.identity(TOY, "s")}) == 8


class TestRegret:
    def results(self, answers: Mapping[int, Mapping[tuple[str, ...], Any]]) -> Results:
        """One number of heads: the oracle read chooses L0H1, `random` L1H3, `uniform` L1H4, all others L0H2."""
        rankings = {"oracle": ("L0H1",), "random": ("L1H3",), "uniform": ("L1H4",)}
        choices = {("shipped", seed): made_up_choices(rankings, ("L0H2",)) for seed in answers}
        return Results(choices, {("shipped", seed): sets for seed, sets in answers.items()})

    def sets(self, oracle: int, others: int, random: int, uniform: int = 0) -> dict[tuple[str, ...], Any]:
        counts = {("L0H1",): oracle, ("L0H2",): others, ("L1H3",): random, ("L1H4",): uniform}
        return {heads: right(count) for heads, count in counts.items()}

    def test_is_the_distance_to_the_best_of_each_seed_averaged_over_seeds(self) -> None:
        found = regrets(self.results({0: self.sets(90, 80, 30), 1: self.sets(70, 80, 40)}), "shipped", "1")
        assert {name: found[name].value for name in ("oracle", "greedy", "random", "uniform")} == pytest.approx(
            {"oracle": 5.0, "greedy": 5.0, "random": 50.0, "uniform": 85.0}
        )
        assert found["oracle"].n == 2 and found["oracle"].low < 5 < found["oracle"].high

    def test_an_interval_is_of_paired_differences(self) -> None:
        same = regrets(self.results({0: self.sets(90, 90, 30)}), "shipped", "1")["greedy"]
        assert (same.value, same.low, same.high) == (0, 0, 0)
        apart = self.sets(50, 0, 0)
        apart["L0H2",] = right(49, start=51)
        wide = regrets(self.results({0: apart}), "shipped", "1")["greedy"]
        assert wide.value == pytest.approx(1.0) and wide.low < -5 and wide.high > 5

    def test_a_seed_with_a_missing_arm_has_no_regret(self) -> None:
        partial = self.sets(90, 80, 30)
        del partial["L1H4",]
        results = self.results({0: partial, 1: self.sets(70, 80, 40)})
        assert results.finished("shipped", 0, "1") == (len(CHOOSERS) - 1, len(CHOOSERS))
        assert regrets(results, "shipped", "1")["greedy"].n == 1
        assert regrets(results, "shipped", "1")["greedy"].value == pytest.approx(0.0)
        assert regrets(self.results({0: partial}), "shipped", "1") == {}
        assert regrets(results, "shipped", "2") == {} and best_accuracy(results, "shipped", "2") is None


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> study.Experiment:
    """A run on the shipped base that was stopped after its second arm and continued for a third."""
    bases = {
        "shipped": StudyBase("the shipped base", BASE, options={"locate_pairs": 24}),
        "gone": StudyBase("a base that is not here", BASE / "nowhere"),
    }
    made = study.Experiment(tmp_path_factory.mktemp("head_choice"), TOY, (0,), bases)
    assert made.run(most=2) == 2
    again = replace(made)
    assert again.run(most=1) == 1
    return again


class TestRun:
    def test_every_chooser_chooses_every_number_of_heads(self, experiment: study.Experiment) -> None:
        choices = read_json(experiment.folder / "choices" / "shipped_seed0.json")
        assert list(choices["choosers"]) == list(CHOOSERS)
        assert len(choices["choosers"]["oracle"]["scores"]) == 32
        for chosen in choices["choosers"].values():
            assert {c: len(set(heads)) for c, heads in chosen["heads"].items()} == {
                "1": 1, "2": 2, "4": 4, LAYER: 8, "8": 8,
            }  # fmt: skip
            assert len({head.split("H")[0] for head in chosen["heads"][LAYER]}) == 1
            assert (chosen["cpu_seconds"] > 0) == (chosen["passes"] > 0)
        heads = {name: chosen["heads"] for name, chosen in choices["choosers"].items()}
        assert heads["greedy"]["1"] == heads["oracle"]["1"]
        assert heads["uniform"]["1"] == ["L2H0"]
        assert set(heads["divergence"]["8"]) == set(heads["divergence"][LAYER])
        scores = choices["choosers"]["ablation"]["scores"]
        assert heads["ablation"]["1"] == [max(scores, key=lambda head: scores[head]["ablation"])]

    def test_finished_arms_are_not_run_again_and_a_missing_one_is(self, experiment: study.Experiment) -> None:
        first, second, third = list(experiment.arms())[:3]
        assert first.name == NO_SPLICE
        assert all(experiment.result(arm) is not None for arm in (first, second, third))
        path = experiment.folder / "arms" / second.file
        before = read_json(path)
        path.unlink()
        assert experiment.run(most=1) == 1
        assert read_json(path)["correct"] == before["correct"]

    def test_choices_are_measured_once_and_a_missing_chooser_alone(
        self, experiment: study.Experiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = experiment.choices("shipped", 0)
        monkeypatch.setattr(choosers_module, "locate_heads", None)
        assert experiment.choices("shipped", 0) == before
        monkeypatch.setitem(choosers_module.CHOOSERS, "middle", Chooser("another", "uniform"))
        added = experiment.choices("shipped", 0)["choosers"]
        assert added["middle"]["heads"] == added["uniform"]["heads"] and added["oracle"] == before["choosers"]["oracle"]
        write_json(experiment.folder / "choices" / "shipped_seed0.json", before)

    def test_the_report_holds_what_the_arms_say(self, experiment: study.Experiment, tmp_path: Path) -> None:
        page, folder = tmp_path / "HEAD_CHOICE.md", tmp_path / "evidence"
        study.report(experiment, page, folder)
        written = tables_on(page)
        assert written.keys() == {"settings", "worst", "designs", "default_branch", "bases"}
        done = sorted((experiment.folder / "arms").glob("*.json"))
        assert f"| finished arms | {len(done)} |" in written["settings"]
        control = read_json(experiment.folder / "arms" / f"shipped-{NO_SPLICE}_seed0.json")
        digits = control["correct"]["kv_retrieval/6"]
        assert f"| no splice | {digits.count('1') / len(digits):.3f} [" in written["bases"]
        assert sorted(path.name for path in (folder / "arms").iterdir()) == [path.name for path in done]
        assert (folder / "choices" / "shipped_seed0.json").is_file()


def test_the_published_tables_are_those_of_the_published_results(tmp_path: Path) -> None:
    # A base that this machine pretrained itself is another one than that of the published results.
    gone = {name: replace(entry, folder=tmp_path / name) for name, entry in BASES.items() if entry.make}
    published = study.Experiment(study.PUBLISHED, bases={**BASES, **gone})
    results, files = study.collected(published)
    done = [read_json(path) for path in files["arms"]]
    assert results.choices and done
    labels = {base: entry.label for base, entry in BASES.items()}
    assert tables_on(study.PAGE) == tables(results, labels, study.settings_of(published, done))


def test_a_mamba1_computes_a_mamba2_up_to_the_norm_behind_the_gate() -> None:
    """With a constant in place of that norm, the logits are equal."""
    model = load(BASE)[0]
    assert isinstance(model, Mamba2ForCausalLM)
    for block, scale in zip(model.backbone.layers, scales := [0.5, 1.0, 2.0, 4.0], strict=True):
        norm = block.mixer.norm
        norm.forward = lambda x, gate, norm=norm, scale=scale: scale * norm.weight * x * nn.functional.silu(gate)
    ids = torch.randint(4, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    converted = mamba1.from_mamba2(model, scales)
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)
    sites = family_of(converted.config).sites(converted.config)
    assert [len(spec.heads) for spec in sites] == [12] * 4
