"""Locating: refuses what cannot be measured, ranks by what was asked, chooses what was asked."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t

from surgery.errors import ModelError, PlanError, ProbeError, RecipeError, RunError
from surgery.locate.locating import locate_heads
from surgery.locate.scores import Record, Table, roles_of
from surgery.locate.selection import rank
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import all_columns
from surgery.types import HeadId, HeadSet, Interval, MixerSpec, ScoredHead, better_read, head_set_from_json, to_json
from tests.support.cases import each
from tests.support.errors import NO_MEMORY, failing
from tests.support.pico import pico_base, pico_family, pico_tokenizer

locating = import_module("surgery.locate.locating")
choosing = import_module("surgery.locate.selection")
COLUMNS = [column.name for column in all_columns().values() if column.effect]
PROMPTS = Locate(pairs=4, examples=6, batch_size=4)


def scored(name: str, reads: Any = "segment_end", **values: float) -> ScoredHead:
    """A head with these margins; every other column is 0."""
    columns = {c: Interval(values.get(c, 0.0), -1.0, 1.0, 9) for c in COLUMNS}
    return ScoredHead(HeadId.parse(name), "neither", reads, columns)


HEADS = (
    scored("L0H0", ablation=3.0, query=0.1, context=2.0, segment_end=0.1),
    scored("L0H1", ablation=2.0, query=0.5, context=-1.0, segment_end=0.9),
    scored("L1H0", "answer_token", ablation=1.0, query=0.9, context=0.0, segment_end=5.0, answer_token=0.5),
    scored("L1H1", "answer_token", ablation=-4.0, query=-0.9, context=0.5, answer_token=1.5),
)
SITES = tuple(MixerSpec(layer, f"backbone.layers.{layer}.mixer", "mamba2", 2, 8, 1, 4) for layer in range(2))


def table_of(**columns: Any) -> Table:
    """Two batches of eight prompts, all right at first; what is left of them without each head."""
    records = []
    for index in range(2):
        rows = {
            c: np.stack([np.broadcast_to(np.asarray(x, float), 16)[8 * index :][:8] for x in v])
            for c, v in columns.items()
        }
        records.append(Record(np.ones((3, 8)), {c: np.stack([2 * r - 1, r, r], 1) for c, r in rows.items()}))
    return Table(records)


def names(heads: Any) -> list[str]:
    return [str(s.head) for s in heads]


class FakeGains:
    """What each perfect read adds on made-up prompts; L0H1 is a backup of L1H1, worth nothing once that reads."""

    WORTH = {("L1H1", "answer_token"): 1.5, ("L0H1", "segment_end"): 0.9, ("L0H0", "answer_token"): 0.6}

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def __call__(self, options: Any, taken: Any) -> Any:
        self.taken.append(taken)
        spoilt = {"L0H1"} if any(str(head) == "L1H1" for head, _ in taken) else set()
        worth = [0.0 if str(h) in spoilt else self.WORTH.get((str(h), reads), 0.0) for h, reads in options]
        return np.array(worth)[:, None] + np.linspace(-0.1, 0.1, 16)


def choose(splice: Splice, section: Locate = PROMPTS, seed: int = 0, gains: Any = None, sites: Any = SITES) -> Any:
    return choosing.choose(rank(HEADS, "sharpen"), sites, splice, section, seed, gains)


@each(
    ("method", "order"),
    [
        ("ablation", ["L0H0", "L0H1", "L1H0", "L1H1"]),
        ("aggregate", ["L1H0", "L0H1", "L0H0", "L1H1"]),
        ("gather", ["L0H0", "L1H1", "L1H0", "L0H1"]),
        ("sharpen", ["L1H1", "L0H1", "L1H0", "L0H0"]),  # by the column in `reads`, L1H0's other one is 5
    ],
)
def test_heads_are_ranked_by_each_method(method: str, order: list[str]) -> None:
    assert names(rank(HEADS, method)) == names(rank(HEADS[::-1], method)) == order


class TestRole:
    def test_by_both_tests(self) -> None:
        """Answers lost at the query, in the context, at both, at neither."""
        roles = roles_of(table_of(query=[0, 1, 0, 1], context=[1, 0, 0, 1]), 4)
        assert roles == ["aggregate", "gather", "both", "neither"]

    def test_both_positions_count_as_tests(self) -> None:
        """One head of 16 with p between 0.05 / 32 and 0.05 / 16: called if the query alone was measured."""
        noise = np.random.default_rng(0).normal(size=20)
        lost = (noise - noise.mean()) / noise.std(ddof=1) + t.isf(0.05 / 24, 19) / 20**0.5
        column = np.zeros((16, 3, 20))
        column[7, 2] = -lost
        for columns, role in ((("query",), "aggregate"), (("query", "context"), "neither")):
            table = Table([Record(np.zeros((3, 20)), dict.fromkeys(columns, column))])
            assert roles_of(table, 16)[7] == role

    def test_a_small_share_of_the_lead_is_no_role(self) -> None:
        clean, small, large = (np.full((3, 20), lead) for lead in (10.0, 9.6, 9.4))
        table = Table([Record(clean, {"query": np.stack([small, large])})])
        assert roles_of(table, 2) == ["neither", "aggregate"]

    def test_what_was_not_measured_is_not_called(self) -> None:
        dropped = [0.0] * 8 + [math.nan] * 8
        table = table_of(query=[dropped, 1, 1], context=[dropped, 0, 1])
        assert roles_of(table, 3) == ["unmeasured", "gather", "neither"]
        assert roles_of(table_of(query=[0, 1, 1]), 3) == ["aggregate", "neither", "neither"]
        assert roles_of(table_of(ablation=[0, 0, 0]), 3) == ["unmeasured"] * 3
        one = Table([Record(np.ones((3, 1)), {"query": np.array([0.0, 2.0])[:, None, None].repeat(3, 1)})])
        assert roles_of(one, 2) == ["unmeasured"] * 2, "one prompt is no test"

    def test_the_better_column_is_read(self) -> None:
        gains = {"segment_end": 0.1, "answer_token": 0.3}
        assert better_read(gains) == "answer_token"
        assert better_read({**gains, "segment_end": 0.31}) == "segment_end"
        assert better_read({"query": 1.0}) is None


class TestChoose:
    def test_random_depends_on_the_seed_alone(self) -> None:
        splice = Splice(select="random", num_heads=2)
        drawn = [names(choose(splice, seed=s)) for s in range(20)]
        assert drawn == [names(choose(splice, seed=s)) for s in range(20)]
        for s in range(20):  # and not on how the heads happen to be ranked
            reordered = choosing.choose(rank(HEADS, "ablation"), SITES, splice, PROMPTS, s, FakeGains())
            assert names(reordered) == drawn[s]
        assert all(len(set(d)) == 2 for d in drawn) and {n for d in drawn for n in d} == set(names(HEADS))

    def test_sharpen_takes_the_next_given_the_first(self) -> None:
        """L0H1 is second alone, and adds nothing to the first; L0H0 does, by its other column."""
        gains = FakeGains()
        first, second = choose(Splice(select="sharpen", num_heads=2), gains=gains)
        assert (str(first.head), first.reads, first.given) == ("L1H1", "answer_token", ())
        assert (str(second.head), second.reads, second.given) == ("L0H0", "answer_token", (first.head,))
        gain = second.scores["gain_given"]
        assert gain.value == pytest.approx(0.6) and gain.n == 16
        assert gains.taken == [[(first.head, "answer_token")]]

    def test_sharpen_looks_at_the_top_alone(self) -> None:
        top = PROMPTS.model_copy(update={"top_k": 2})
        _, second = choose(Splice(select="sharpen", num_heads=2), top, gains=FakeGains())
        assert str(second.head) == "L0H1"
        with pytest.raises(PlanError, match=r"num_heads: 3.*locate\.top_k"):
            choose(Splice(select="sharpen", num_heads=3), top, gains=FakeGains())

    @each("select", ["sharpen", "ablation", "random", "gather", "aggregate"])
    def test_only_among_the_sites(self, select: Any) -> None:
        """Layer 1 has keys and values of its own: its heads are ranked, and none is chosen."""
        splice, ranked = Splice(select=select, num_heads=2), rank(HEADS, "sharpen")
        chosen = choosing.choose(ranked, SITES[:1], splice, PROMPTS, 0, FakeGains())
        assert set(names(chosen)) == {"L0H0", "L0H1"}
        with pytest.raises(PlanError, match=r"num_heads: 3\. Set at most 2"):
            choosing.choose(ranked, SITES[:1], Splice(select=select, num_heads=3), PROMPTS, 0, FakeGains())
        listed = Splice(select="list", heads=("L1H0",))
        with pytest.raises(PlanError, match=r"splice\.heads: L1H0\. .*L0H0 to L0H1"):
            choosing.choose(ranked, SITES[:1], listed, PROMPTS, 0, FakeGains())


class TestLocate:
    @staticmethod
    def _model(**more: Any) -> Any:
        return pico_base(vocab_size=1024, layers=2, **more)

    @pytest.fixture
    def any_accuracy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(locating, "check_clean", lambda *_: None)

    @each(("pairs", "hint"), [(5, "Set fewer pairs, or run `surgery init MODEL`"), (4, "splice.select: random")])
    def test_a_base_at_chance_is_refused_with_a_way_on(self, pairs: int, hint: str) -> None:
        section = PROMPTS.model_copy(update={"pairs": pairs})
        with pytest.raises(ProbeError, match=rf"locate\.pairs: {pairs} .*at chance.*{hint}"):
            locate_heads(self._model(), pico_tokenizer(), section)

    @each("fault", ["chance", "nan", "tokenizer"])
    def test_what_can_be_known_first_is_refused_before_any_head_is_measured(
        self, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(locating, "measure_heads", lambda *_: pytest.fail("heads were measured"))
        model = pico_base(vocab_size=61, layers=2) if fault == "tokenizer" else self._model()
        if fault == "nan":
            model.backbone.layers[0].mixer.D.data[1] = torch.nan
        error = ProbeError if fault == "chance" else ModelError
        says = {"chance": "at chance", "nan": "are NaN", "tokenizer": "largest token id is 972, but the model has 61"}[
            fault
        ]
        with pytest.raises(error, match=says):
            locate_heads(model, pico_tokenizer(), PROMPTS)

    @each("error", NO_MEMORY)
    @each(("size", "hint"), [(4, "Lower it"), (1, "Lower locate.pairs")])
    def test_a_lack_of_memory_names_what_to_lower(
        self, error: Exception, size: int, hint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self._model()
        monkeypatch.setattr(model, "forward", failing(error))
        section = PROMPTS.model_copy(update={"batch_size": size})
        for splice in (None, Splice(select="random")):
            with pytest.raises(RunError, match=rf"locate\.batch_size: {size}\. Out of memory\. {hint}"):
                locate_heads(model, pico_tokenizer(), section, splice)

    def test_settings_that_do_not_fit_are_refused(self) -> None:
        """A ranking that is not measured, and a fill from other prompts where a batch has one alone."""
        for section, splice, says in (
            *(
                (
                    {"methods": ("query",)},
                    Splice(select=select),
                    rf"splice\.select: {select}\. Add \w+ to locate\.methods",
                )
                for select in ("sharpen", "ablation", "gather")
            ),
            ({"fill": "mean", "examples": 5}, None, r"single prompt.*locate\.batch_size"),
        ):
            with pytest.raises((RecipeError, ProbeError), match=says):
                locate_heads(self._model(), pico_tokenizer(), PROMPTS.model_copy(update=section), splice)

    def test_heads_that_move_nothing_are_refused(self, any_accuracy: None) -> None:
        model = self._model()
        for block in model.backbone.layers:
            block.mixer.out_proj.weight.data.zero_()
        for methods, says in ((PROMPTS.methods, "no logit"), (("patching", "sharpen"), "depends on the answer")):
            with pytest.raises(ModelError, match=says):
                locate_heads(model, pico_tokenizer(), PROMPTS.model_copy(update={"methods": methods}))

    def test_measures_every_head(self, any_accuracy: None) -> None:
        model, steps = self._model(), []
        found = locate_heads(
            model,
            pico_tokenizer(),
            PROMPTS,
            Splice(select="sharpen", num_heads=2),
            seed=3,
            name="pico",
            revision="r1",
            progress=lambda done, of: steps.append((done, of)),
        )
        assert isinstance(found, HeadSet) and (found.model, found.revision, found.seed) == ("pico", "r1", 3)
        assert found.geometry == geometry_of(model.config) and found.method == "sharpen"
        assert sorted(names(found.heads)) == [f"L{layer}H{h}" for layer in range(2) for h in range(4)]
        assert found.heads == rank(found.heads, "sharpen") and found.chosen[0] == found.heads[0]
        assert found.chosen[1].given == (found.chosen[0].head,)
        for head in found.heads:
            assert set(head.scores) == {*COLUMNS, *(f"{c}_accuracy" for c in COLUMNS)}
            assert all(i.n == 6 and i.low <= i.value <= i.high for i in head.scores.values())
            end, token = (head.scores[place].value for place in ("segment_end", "answer_token"))
            assert head.reads == ("segment_end" if end > max(0, token) else "answer_token")
        # Above the last layer only the query is read: there, context ablation does nothing and the rest is the query's.
        for head in found.heads:
            if head.head.layer == 1:
                assert abs(head.scores["context"].value) < 1e-5
                assert head.scores["ablation"].value == pytest.approx(head.scores["query"].value, abs=1e-4)
        assert steps == [(i + 1, len(steps)) for i in range(len(steps))], "progress ends at its end"
        assert set(found.clean) == {"accuracy", "margin"} and found.clean["accuracy"].n == 6
        assert head_set_from_json(to_json(found)) == found

    def test_the_default_chooses_by_activation_patching(self, any_accuracy: None) -> None:
        """Further heads are the next of the ranking, with no further pass. Training still gets the position to read."""
        model, steps = self._model(), []
        one, two = (
            locate_heads(model, pico_tokenizer(), PROMPTS, splice, seed=3, progress=lambda *at: steps.append(at))
            for splice in (None, Splice(num_heads=2))
        )
        assert one.method == two.method == "patching" and one.heads == two.heads
        lost = [s.scores["patching"].value for s in two.heads]
        assert lost == sorted(lost, reverse=True) and lost[0] > lost[-1]
        assert one.chosen == two.heads[:1] and two.chosen == two.heads[:2]
        assert all(s.reads in ("segment_end", "answer_token") and s.given == () for s in two.chosen)
        assert steps[: len(steps) // 2] == steps[len(steps) // 2 :]

    @each("family, select", [("bamba", "patching"), ("zamba2", "sharpen"), ("llama", "aggregate")])
    def test_attention_heads_are_measured_and_never_chosen(self, family: str, select: str, any_accuracy: None) -> None:
        model = pico_family(family, vocab_size=1024)
        mixers = family_of(model.config).mixers(model.config)
        sites = {spec.name for spec in family_of(model.config).sites(model.config)}
        assert any(not spec.is_ssm for spec in mixers)
        found = locate_heads(model, pico_tokenizer(), PROMPTS, Splice(select=select, num_heads=2))
        assert sorted(s.head for s in found.heads) == sorted(head for spec in mixers for head in spec.heads)
        assert {s.head.mixer for s in found.chosen} <= sites
        assert len(found.chosen) == (2 if sites else 0)
        assert head_set_from_json(to_json(found)) == found

    @each("training", [False, True])
    def test_gives_the_model_back_in_its_mode(self, training: bool) -> None:
        model = self._model().train(training)
        with pytest.raises(ProbeError):
            locate_heads(model, pico_tokenizer(), PROMPTS)
        assert model.training == training
        locate_heads(model, pico_tokenizer(), PROMPTS, any_accuracy=True)
        assert model.training == training


def test_own_prompts_are_measured_with_generated_ones(tmp_path: Path) -> None:
    rows = [{"prompt": f"a:{n}\nb:{n + 1}\nThe value of b is", "answer": str(n + 1)} for n in range(20, 32, 2)]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(file), "columns": {"answer_span": "auto"}}
    section = Locate(methods=("query", "patching", "sharpen"), pairs=4, batch_size=4, data=data, generated=3)
    heads = locate_heads(pico_base(vocab_size=len(pico_tokenizer())), pico_tokenizer(), section, any_accuracy=True)
    assert {scored.scores["query"].n for scored in heads.heads} == {len(rows) + 3}
    with pytest.raises(ProbeError, match=r"locate.data: .*own.jsonl \(clean accuracy 0\.\d\d of \d+ prompts\)"):
        locate_heads(
            pico_base(vocab_size=len(pico_tokenizer())), pico_tokenizer(), section.model_copy(update={"generated": 0})
        )
