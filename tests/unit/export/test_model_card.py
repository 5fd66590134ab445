"""The card: front matter that the Hub's client reads back, measured numbers alone, whose licence, no path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from surgery.export.model_card import card_of, model_card
from surgery.recipe import Locate, Recipe, Splice, check_recipe, to_yaml
from surgery.recipe.public import public_name, public_recipe
from surgery.types import Interval
from tests.support.reports import head_set, plan, spliced

SHARE = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 100}
TASKS = ("letter_choice", "option_text", "closed_book", "closed_book_seen")


def arm(value: float) -> dict[str, Any]:
    held_out = {"rows.jsonl": {**SHARE, "accuracy": value, "n": 80}, "texts.jsonl": {"perplexity": 2 + value, "n": 9}}
    return {
        "held_out": held_out,
        "kv_retrieval": {"8": SHARE},
        **dict.fromkeys(TASKS, SHARE),
        "perplexity": 2.0,
        "perplexity_seen": 2.0,
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    for name in ("quick/export", "own/base", "own/teacher"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    data = {"path": str(tmp_path / "rows.jsonl"), "holdout": 0.1}
    source = {"data": data, "rows": 2, "weights": {"answer": 1, "distil": 1}}
    given = {
        "name": "further",
        "base": {"model": str(tmp_path / "quick/export")},
        "splice": None,
        "control": {"model": str(tmp_path / "own/base")},
        "train": {"steps": 7, "sources": [source], "teacher": {"model": str(tmp_path / "own/teacher")}},
    }
    return check_recipe(given)


def read(card: str) -> Any:
    """The front matter as the Hub's own client reads it."""
    return ModelCard(card).data


DIFFERENCE = {"difference": 0.1, "low": 0.05, "high": 0.15}
RESULTS = {
    "arms": {"base": arm(0.1), "no_splice": arm(0.3), "hybrid": arm(0.9)},
    "comparisons": {
        "hybrid": {"no_splice": {"kv_retrieval/8": {**DIFFERENCE, "p_two_sided": 0.0039, "significant": True}}}
    },
    "step_zero_gap": {"max_logit": 0.25, "kl": 0.1, "same_top": 0.9},
    "versions": {"surgery": "9.9", "torch": "8.8"},
}


def test_the_rows_are_those_of_the_arms_and_none_is_made_up(recipe: Recipe) -> None:
    """Of a fine-tuning, a run with p-values, arms that measured other tasks, lm-eval, and names with a bar."""
    cell, row = "0.500 [0.400, 0.600]", {**SHARE, "n": 8}
    tuned = {"arms": {"base": arm(0.1), "no_splice": arm(0.3), "hybrid": arm(0.9)}}
    for found in tuned["arms"].values():
        found["held_out"] |= {"a|b.jsonl": row}
        found["held_out"]["rows.jsonl"] |= {"first_token": row, "loss": {"nats": 1.2345, "tokens": 99}}
    some = {**arm(0.9), "kv_retrieval": {"8": {**SHARE, "generated": {**SHARE, "accuracy": 0.25}}}}
    tasks = {"squad": {"exact_match,none": 0.25, "f1,none": 0.75, "n": 4}, "absent": {"skipped": "no data"}}
    several = {"teacher": {"kv_retrieval": {"8": SHARE}}, "base": {**some, "lm_eval": tasks}}
    shown: list[tuple[Recipe, dict[str, Any], tuple[str, ...]]] = [
        (
            recipe,
            tuned,
            (
                "Fine-tuned from quick on rows.jsonl",
                "| | **hybrid** | control (base, same training) | before fine-tuning | prompts |",
                "| rows.jsonl, held-out rows, exact match "
                "| 0.900 [0.400, 0.600] | 0.300 [0.400, 0.600] | 0.100 [0.400, 0.600] | 80 |",
                f"| rows.jsonl, held-out rows, first token | {cell} | {cell} | {cell} | 8 |",
                "| rows.jsonl, held-out rows, loss in nats per answer token | 1.234 | 1.234 | 1.234 |  |",
                "| perplexity of texts.jsonl, held-out rows | 2.900 | 2.300 | 2.100 | 9 |",
                f"| a\\|b.jsonl, held-out rows, exact match | {cell} | {cell} | {cell} | 8 |",
                "| L1H2 | add | ssm | answer token | unknown |",
            ),
        ),
        (
            spliced("owner/base"),
            RESULTS,
            (
                "| | **hybrid** | control (trained, no splice) | base | prompts | p, against the control |",
                f"| KV-retrieval, 8 pairs | {cell} | {cell} | {cell} | 100 | 0.0039 * |",
                "Before training, the hybrid's logits differed from the base's by at most 0.25.",
                "Measured with surgery 9.9, torch 8.8.",
            ),
        ),
        (
            spliced("owner/base"),
            {"arms": {**several, "hybrid": several["base"]}},
            (
                "| | **hybrid** | base | teacher | prompts |",
                "| KV-retrieval, 8 pairs, generated | 0.250 [0.400, 0.600] | 0.250 [0.400, 0.600] | not measured |",
                f"| letter choice | {cell} | {cell} | not measured |",
                "| squad (lm-eval), f1 | 0.750 | 0.750 | not measured | 4 |",
            ),
        ),
    ]
    for of, results, lines in shown:
        card = model_card(of, None, plan(), results)
        for line in lines:
            assert line in card, line
        assert "absent" not in card


def test_nothing_of_this_machine_goes_in(recipe: Recipe, tmp_path: Path) -> None:
    """Files and folders are called by the last part of their paths; the recipe itself stays as it is."""
    own = recipe.export.model_copy(update={"chat_template": str(tmp_path / "own" / "chat.jinja")})
    data = {"path": str(tmp_path / "own.jsonl"), "columns": {"answer_span": "auto"}}
    located = recipe.model_copy(update={"splice": Splice(), "locate": Locate(data=data, generated=4), "export": own})
    card = model_card(located, replace(head_set(), method="aggregate", seed=0), plan(), RESULTS)
    assert "on prompts of own.jsonl and generated KV-retrieval prompts (seed 0)" in card
    assert "The chat template (`chat.jinja`) was set for the export." in card
    for text in (card, to_yaml(public_recipe(located))):
        assert str(tmp_path) not in text and all(name in text for name in ("rows.jsonl", "own.jsonl", "chat.jinja"))
    assert str(tmp_path) in to_yaml(located)
    assert public_name(str(tmp_path / "quick" / "export")) == "quick", "the folder of an export has its run's name"
    assert public_name(str(tmp_path / "quick" / "other")) == "other" and public_name("owner/name@main") == "owner/name"


def test_pinned_revisions_are_published() -> None:
    """Of every model that a recipe names, its tokenizer and its data, in whichever way they are given."""
    for written in (True, False):

        def pinned(name: str) -> dict[str, str]:
            if written:  # noqa: B023
                return {"model": f"org/{name}@{name}123"}
            return {"model": f"org/{name}", "revision": f"{name}123"}

        source = {"data": {"path": "org/rows", "revision": "r1"}, "rows": 1, "weights": {"distil": 1.0}}
        train = {"steps": 1, "teacher": pinned("guide"), "sources": [source]}
        plain = {"name": "x", "base": {**pinned("base"), "tokenizer": "org/words@w1"}, "train": train}
        with_donor = {**plain, "splice": {"init": "teacher", "teacher": pinned("donor")}}
        tuned = {**plain, "splice": None, "control": pinned("control")}
        for recipe in (check_recipe(with_donor), check_recipe(tuned)):
            shared = public_recipe(recipe)
            models = [m for m in (shared.base, shared.control, shared.teacher, shared.train.teacher) if m is not None]
            assert len(models) == 3
            for model in models:
                assert model.revision == f"{model.model.removeprefix('org/')}123"
            assert shared.base.tokenizer == "org/words@w1" and shared.train.own_data[0].revision == "r1"
            assert public_recipe(shared) == shared and check_recipe(yaml.safe_load(to_yaml(shared))) == shared


def test_the_licence_is_the_bases_own(tmp_path: Path) -> None:
    """A base's card names it, in a folder and with a licence of its own name; links stay links. Or the recipe's."""
    front = (
        "---\nlicense: other\nlicense_name: own-terms\nlicense_link: LICENSE\nbase_model: owner/first\n---\n# base\n"
    )
    (tmp_path / "README.md").write_text(front)
    base_card = card_of(str(tmp_path))
    data = read(model_card(spliced(str(tmp_path)), None, plan(), RESULTS, base_card))
    assert (data.license, data.license_name, data.license_link) == ("other", "own-terms", "LICENSE")
    assert (data.base_model, data.base_model_relation) == ("owner/first", "finetune")
    from_hub = read(model_card(spliced("owner/base"), None, plan(), RESULTS, base_card))
    assert from_hub.license_link == "https://huggingface.co/owner/base/blob/main/LICENSE"
    assert from_hub.base_model == "owner/base"
    own = spliced(str(tmp_path), license="llama3.2")
    assert read(model_card(own, None, plan(), RESULTS, base_card)).license == "llama3.2"


def test_a_licence_that_nobody_names_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\ntags: [a]\n---\n")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "README.md").write_text("---\nlicense: unknown\n---\n")  # as an export's card can say
    for model in (str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "unknown"), "owner/not-cached"):
        card = model_card(spliced(model), None, plan(), RESULTS, card_of(model))
        assert read(card).license == "unknown" and "**Unknown**" in card


def test_what_is_no_text_in_the_bases_card_is_left_out(tmp_path: Path) -> None:
    """A card that cannot be read is no card."""
    values = ("3", "true", "!!timestamp 2020-01-01", "{a: b}", "[1]", "[[x]]", '"\\ud800"', "[" * 3000, "!!binary aGk=")
    wrong = [f"---\nlicense: {value}\nbase_model: {value}\n---\n" for value in (*values, "&a [*a]")]
    for content in (*wrong, "no front matter", "---\n- a\n---\n", "---\na: [\n---\n", "\xff"):
        (tmp_path / "README.md").write_text(content, encoding="latin-1")
        assert card_of(str(tmp_path)) == {}, content[:80]


def test_the_model_index_holds_the_hybrids_numbers_and_no_others() -> None:
    """The Hub's client reads every result back, each under a data set of its own, generated ones marked."""
    hybrid = {**arm(0.9), "lm_eval": {"squad": {"exact_match,none": 0.25, "f1,none": 0.75, "n": 4}}}
    hybrid["held_out"]["rows.jsonl"] |= {"first_token": SHARE, "loss": {"nats": 1.2345, "tokens": 99}}
    results = {"arms": {**RESULTS["arms"], "hybrid": hybrid}}
    found = read(model_card(spliced("owner/base"), None, plan(), results)).eval_results
    measured = {(r.dataset_name, r.metric_type): r.metric_value for r in found}
    assert len(measured) == len(found) == len({r.unique_identifier for r in found}) == 13
    expected = {
        ("KV-retrieval, 8 pairs (generated probe)", "accuracy"): 0.5,
        ("rows.jsonl, held-out rows, exact match", "accuracy"): 0.9,
        ("rows.jsonl, held-out rows, first token", "accuracy"): 0.5,
        ("rows.jsonl, held-out rows, loss in nats per answer token", "loss"): 1.2345,
        ("perplexity of texts.jsonl, held-out rows", "perplexity"): 2.9,
        ("squad (lm-eval), exact_match", "exact_match"): 0.25,
        ("squad (lm-eval), f1", "f1"): 0.75,
    }
    assert {name: measured[name] for name in expected} == expected
    assert {r.dataset_type for r in found if r.metric_type == "f1"} == {"squad"}
    kv = next(r for r in found if r.dataset_type == "ssm-surgery-kv_retrieval")
    assert kv.dataset_args["prompts"] == 100 and (kv.metric_args["low"], kv.metric_args["high"]) == (0.4, 0.6)


def test_a_transplant_comes_from_two_models(tmp_path: Path) -> None:
    card = model_card(spliced("owner/base"), None, plan("owner/donor"), RESULTS)
    assert (read(card).base_model, read(card).base_model_relation) == (["owner/base", "owner/donor"], "merge")
    assert "The transplanted attention comes from owner/donor" in card
    data = read(model_card(spliced("owner/base"), None, plan(str(tmp_path / "donor")), RESULTS))
    assert (data.base_model, data.base_model_relation) == ("owner/base", "merge"), "a donor without a name on the Hub"


def test_retrieval_is_claimed_only_for_located_heads_with_a_measured_effect_in_a_base_that_retrieves() -> None:
    def claims(method: str, low: float, right: float) -> bool:
        heads = head_set(3, 4)
        chosen = tuple(replace(s, scores={"patching": Interval(1.0, low, 2.0, 50)}) for s in heads.chosen)
        kv = {"accuracy": right, "low": right - 0.05, "high": right + 0.05, "n": 200, "chance": 0.125}
        results = {"arms": {name: {"kv_retrieval": {"8": kv}} for name in ("base", "hybrid")}}
        card = model_card(spliced("owner/base"), replace(heads, method=method, chosen=chosen), plan(), results)
        assert ("as an untrained model is" in card) == (right < 0.2)
        return "retrieval depends on" in card.replace("\n", " ")

    assert claims("patching", 0.5, 0.9)
    assert not any((claims("random", 0.5, 0.9), claims("patching", -0.5, 0.9), claims("patching", 0.5, 0.13)))
    assert "retrieval depends on" not in model_card(spliced("owner/base"), None, plan(), RESULTS).replace("\n", " ")
