"""The site selection study: its modules, statistics and tables, and an interrupted run of two arms."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.common import ROOT
from bench.studies.site_selection import study
from bench.studies.site_selection.arms import (
    METHODS,
    SECOND,
    SHIPPED,
    TRANSFORMER,
    Arm,
    Budget,
    Choices,
    main_arms,
    site_arm,
)
from bench.studies.site_selection.models import LinearAttention, hidden_rows, linear_rows, make_linear
from bench.studies.site_selection.statistics import Results, correlation, paired, sites
from bench.studies.site_selection.tables import ENOUGH, fill, tables, tables_on
from bench.studies.site_selection.train import prepared, run_arm
from surgery.errors import RunError
from surgery.files.atomic import read_json, write_json
from surgery.hybrid.modeling_hybrid import SplicedAttention, SplicePass
from surgery.types import HeadId
from tests.support.pico import pico_base, pico_hybrid, pico_site, prompts, tokens

TOY = Budget(
    steps=3, warmup=1, rows=2, keep_rows=2, pairs=(4, 5), evaluate_pairs=(4, 32), examples=6, sentences=4,
    locate_pairs=24, locate_examples=16,
)  # fmt: skip
HEADS = [f"L{layer}H{head}" for layer in range(4) for head in range(8)]


def made_up_choices(sharpen: str = "L0H1", ablation: str = "L1H3") -> Choices:
    """As `choose` writes them, without a model; scores fall with the head's place."""
    scores = {head: {"sharpen": 1.0 - i / 40, "ablation": i / 40} for i, head in enumerate(HEADS)}
    return {
        "methods": {"sharpen": [sharpen, "L0H2", "L2H0", "L3H7"], "ablation": [ablation], "attribution": [ablation],
                    "random": ["L3H5"]},
        "layers": {"divergence": 0, "uniform": 2},
        "reads": dict.fromkeys(HEADS, "answer_token"),
        "scores": scores, "divergence": [1.0, 0.5, 0.2, 0.1], "clean": 0.7, "pairs": 24,
    }  # fmt: skip


class Small(study.Experiment):
    """Two arms of three steps, one of them with LoRA, without locating."""

    def choices(self, base: str, seed: int) -> Choices:
        path = self.folder / "choices" / f"{base}_seed{seed}.json"
        write_json(path, {"key": "", "base": base, "seed": seed, **made_up_choices()})
        return read_json(path)

    def arms(self, only: str | None = None) -> Iterator[Arm]:
        yield Arm(SHIPPED, "no-splice", 0)
        yield site_arm(self.choices(SHIPPED, 0), SHIPPED, 0, "site-L0H1", ["L0H1"], trains="lora")


def answers(right: str) -> dict[str, Any]:
    """A result with these answers at 32 pairs."""
    return {"correct": {"kv_retrieval/32": right}, "summary": {"kv_retrieval": {"32": {"accuracy": _mean(right)}}}}


def _mean(right: str) -> float:
    return right.count("1") / len(right)


class TestArms:
    def test_methods_that_agree_share_an_arm(self) -> None:
        agreeing = [arm.name for arm in main_arms(made_up_choices("L0H1", "L0H1"), SHIPPED, 0)]
        apart = [arm.name for arm in main_arms(made_up_choices("L0H1", "L1H3"), SHIPPED, 0)]
        assert set(apart) - set(agreeing) == {"site-L1H3"} and len(agreeing) == len(set(agreeing))

    def test_identity_depends_on_every_part_of_the_definition(self) -> None:
        arm, other = Arm(SHIPPED, "x", 0), Arm("b", "y", 1, ("L0H1",), ("answer_token",), "linear", "replace",
                                               "random", False, "lora", 8)  # fmt: skip
        changed = [replace(arm, **{f.name: getattr(other, f.name)}) for f in fields(Arm)]
        keys = {a.identity(TOY, "r") for a in (arm, *changed)} | {arm.identity(TOY, "s"), arm.identity(Budget(), "r")}
        assert len(keys) == len(fields(Arm)) + 3 and arm.identity(TOY, "r") == Arm(SHIPPED, "x", 0).identity(TOY, "r")


class TestLinearAttention:
    def branch(self) -> tuple[Any, LinearAttention]:
        hybrid = pico_hybrid([pico_site(1, [0, 2])])
        return hybrid, make_linear(hybrid)[0]

    def test_is_the_sum_over_the_past_without_a_softmax(self) -> None:
        hybrid, branch = self.branch()
        u_BTD = torch.randn(2, 7, hybrid.config.hidden_size, generator=torch.Generator().manual_seed(0))
        query, key, value = branch.project(u_BTD, None, SplicePass(), None)
        mixed = torch.zeros(2, 7, branch.num_heads, branch.v_width)
        for b, h, t in np.ndindex(2, branch.num_heads, 7):
            for s in range(t + 1):
                mixed[b, t, h] += (query[b, h, t] @ key[b, h, s]) * value[b, h, s]
        # The RMSNorm's epsilon is all that knows of the scale.
        branch.norm_eps = 0.0
        assert torch.allclose(branch(u_BTD)[0], branch.put_out(mixed, u_BTD), atol=1e-4)

    def test_keeps_the_weights_and_is_another_function(self) -> None:
        softmax = pico_hybrid([pico_site(1, [0, 2])])
        linear = copy.deepcopy(softmax)
        make_linear(linear)
        assert all(torch.equal(a, b) for a, b in zip(softmax.parameters(), linear.parameters(), strict=True))
        ids = tokens()
        assert not torch.allclose(softmax(ids, use_cache=False).logits, linear(ids, use_cache=False).logits, atol=1e-3)

    def test_left_padding_changes_nothing(self) -> None:
        hybrid, _ = self.branch()
        batch = prompts((9, 14))
        padded = hybrid(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits[0, -1]
        alone = hybrid(batch.input_ids[:1, 5:], use_cache=False).logits[0, -1]
        assert torch.allclose(padded, alone, atol=1e-4)

    def test_supervised_rows_are_shares_of_the_past(self) -> None:
        hybrid, branch = self.branch()
        batch = prompts((14, 14))
        hybrid(batch.input_ids, use_cache=False)
        rows_BHT = linear_rows([branch])(batch)[0][:, :, 0]
        assert torch.allclose(rows_BHT.sum(-1), torch.ones(rows_BHT.shape[:-1]), atol=1e-5) and (rows_BHT >= 0).all()


class TestHiddenRows:
    def test_are_shares_of_the_past_with_gradients(self) -> None:
        model, batch = pico_base(), prompts((12, 12))
        batch = replace(batch, read_query=batch.read_query - 2)
        with hidden_rows(model, HeadId(1, 3)) as rows:
            model(batch.input_ids, use_cache=False)
            (rows_BHQT,) = rows(batch)
        assert torch.allclose(rows_BHQT.sum(-1), torch.ones(2, 1, 1), atol=1e-5)
        assert (rows_BHQT[..., -2:] == 0).all(), "a query reads what comes after it"
        rows_BHQT[..., 3].sum().backward()
        moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        assert {"backbone.layers.1.mixer.A_log", "backbone.layers.1.mixer.in_proj.weight"} <= moved
        assert not any(".layers.2." in name for name in moved)


@pytest.mark.parametrize("kind", ["none", "softmax", "linear", "hidden"])
def test_every_kind_starts_as_the_base(kind: Any) -> None:
    base = pico_base(vocab_size=1024)
    heads, reads = ((), ()) if kind == "none" else (("L1H2",), ("segment_end",))
    ids = tokens()
    with prepared(Arm(SHIPPED, "x", 0, heads, reads, kind), base, TOY) as (model, _):
        assert torch.equal(model(ids, use_cache=False).logits, base(ids, use_cache=False).logits)
        assert any(isinstance(m, SplicedAttention) for m in model.modules()) == (kind in ("softmax", "linear"))


class TestStatistics:
    def test_spearman_sees_the_order_alone(self) -> None:
        x = np.random.default_rng(0).normal(size=20)
        found = correlation(x, np.exp(3 * x))
        assert found is not None and found.spearman.value == pytest.approx(1) and found.pearson.value < 0.9
        assert found.pearson.low <= found.pearson.value <= found.pearson.high

    def test_pairing_is_antisymmetric_and_over_shared_seeds_alone(self) -> None:
        better, worse = {0: answers("11110"), 1: answers("11111")}, {0: answers("00010"), 2: answers("11111")}
        there, back = paired(better, worse, 32), paired(worse, better, 32)
        assert there is not None and back is not None
        assert there.difference == pytest.approx(3 / 5) == -back.difference and there.p == back.p
        assert (there.wins, there.seeds) == (1, 1) and paired(better, {5: answers("1")}, 32) is None
        assert paired(better, better, 32).p == 1.0  # type: ignore[union-attr]

    def test_sites_gain_over_the_control_of_their_own_seed(self) -> None:
        arms = {
            (SHIPPED, "no-splice"): {0: answers("1000"), 1: answers("1100")},
            (SHIPPED, "site-L0H1"): {0: answers("1111"), 1: answers("1111")},
            (SHIPPED, "site-L2H0"): {1: answers("1100")},
        }
        found = sites(Results(arms, {(SHIPPED, s): made_up_choices() for s in (0, 1)}), SHIPPED, 32)
        assert [(s.head, s.seeds) for s in found] == [("L0H1", (0.75, 0.5)), ("L2H0", (0.0,))]


class TestTables:
    def table(self, ours: str, theirs: str, ablation: str = "L1H3") -> dict[str, list[str]]:
        """The comparison, cells by arm: the oracle-read head's arm answers `ours`, the random head's `theirs`."""
        arms = {
            (SHIPPED, "no-splice"): {0: full(answers("10" * 100))},
            (SHIPPED, "site-L0H1"): {0: full(answers(ours))},
            (SHIPPED, "site-L3H5"): {0: full(answers(theirs))},
        }
        found = tables(Results(arms, {(SHIPPED, 0): made_up_choices("L0H1", ablation)}), {})["shipped/comparison"]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
        return {row[0]: row for row in rows}

    def test_differences_and_significance_follow_the_paired_test(self) -> None:
        good, poor = "1" * 180 + "0" * 20, "10" * 90 + "0" * 20
        assert self.table(good, poor)["random head"][5] == "-45.0 points, p = 2e-27 *"
        assert self.table(poor, good)["random head"][5] == "+45.0 points, p = 2e-27 *"
        assert self.table(good, "1" * 179 + "0" * 21)["random head"][5] == "-0.5 points, p = 1"
        assert self.table(good, poor)["oracle-read head"][1].startswith("**0.900** [0.85")

    def test_text_around_the_tables_stays(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("# Title\n<!-- begin a/b -->\nold\n<!-- end a/b -->\nBy hand.\n")
        fill(page, {"a/b": "new\n", "c": "not on this page\n"})
        assert page.read_text() == "# Title\n<!-- begin a/b -->\nnew\n<!-- end a/b -->\nBy hand.\n"
        with pytest.raises(RunError, match="No results for the table 'a/b'"):
            fill(page, {"c": "x\n"})


def full(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the other measures that a table holds."""
    others = {"closed_book": {"accuracy": 1.0}, "perplexity": 2.0}
    return {**result, "summary": {**result["summary"], **others}, "parameters": {"trained": 1}}


def test_the_published_tables_are_those_of_the_published_results() -> None:
    published = study.Experiment(ROOT / "paper" / "evidence")
    results = study.collected(published)
    done = [result for seeds in results.arms.values() for result in seeds.values()]
    assert len(done) >= 149 and len(sites(results, SHIPPED, 32)) >= ENOUGH
    assert tables_on(ROOT / "paper" / "EVIDENCE.md") == tables(results, study.settings_of(published.budget, done))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after its first arm and went on."""
    folder = tmp_path_factory.mktemp("evidence")
    assert Small(folder, TOY, (0,)).run(most=1) == 1
    assert Small(folder, TOY, (0,)).run() == 1
    return folder


class TestRun:
    def test_finished_arms_are_not_run_again_and_a_missing_one_is(self, finished: Path) -> None:
        assert Small(finished, TOY, (0,)).run() == 0
        path = finished / "arms" / "shipped-site-L0H1_seed0.json"
        before = read_json(path)
        path.unlink()
        assert Small(finished, TOY, (0,)).run() == 1
        assert read_json(path)["correct"] == before["correct"], "the same arm gives other answers"

    def test_the_report_holds_what_the_arms_say(self, finished: Path, tmp_path: Path) -> None:
        page = tmp_path / "paper" / "EVIDENCE.md"
        study.report(Small(finished, TOY, (0,)), page)
        comparison = tables_on(page)["shipped/comparison"]
        for path in sorted((finished / "arms").glob("*.json")):
            value = read_json(path)["summary"]["kv_retrieval"]["32"]["accuracy"]
            assert f"**{value:.3f}**" in comparison
            assert (page.parent / "evidence" / "arms" / path.name).read_bytes() == path.read_bytes()
        assert tables_on(page).keys() == {"settings", "shipped/chosen", "shipped/comparison"}
        figures = page.parent / "evidence" / "shipped"
        assert (figures / "accuracy_by_pairs.png").is_file() and (figures / "arms.png").is_file()


def test_missing_bases_are_made_once_and_train_as_arms(tmp_path: Path) -> None:
    text = study.Experiment(tmp_path).second.read_text()
    short = text.replace("steps: 1000", "steps: 1").replace("rows: 16", "rows: 2").split("evaluate:")[0]
    recipe = tmp_path / "short.yaml"
    recipe.write_text(short + "evaluate: {pairs: [4], examples: 2, sentences: 2}\n")
    made = study.Experiment(tmp_path / "run", TOY, (0,), second=recipe)
    later = replace(made, second=tmp_path / "none")
    for base, kind in ((SECOND, "mamba2"), (TRANSFORMER, "llama")):
        model, tokenizer, revision = made.model(base)
        assert model.config.model_type == kind and later.model(base)[2] == revision
        result = run_arm(Arm(base, "no-splice", 0), model, tokenizer, TOY, study.questions(TOY))
        assert result["losses"]["loss"] > 0 and result["parameters"]["all"] == result["parameters"]["trained"]


def test_choices_are_the_best_by_each_method(tmp_path: Path) -> None:
    choices = study.Experiment(tmp_path, TOY, (0,)).choices(SHIPPED, 0)
    scores = choices["scores"]
    assert sorted(scores) == sorted(HEADS) and set(choices["methods"]) == set(METHODS)
    for method in ("sharpen", "ablation", "attribution"):
        assert choices["methods"][method][0] == max(scores, key=lambda head, m=method: scores[head][m])
    assert len(set(choices["methods"]["sharpen"])) == 4
    divergence = choices["divergence"]
    assert choices["layers"]["divergence"] == max(range(4), key=lambda layer: divergence[layer])
