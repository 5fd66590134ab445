"""`surgery finetune`: a tiny hybrid trained further on a user's own lines, end to end; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from surgery.data.documents import is_held_out
from surgery.models.lookup import family_of, geometry_of
from surgery.splice.graft import splice_model
from surgery.types import Graft, Plan
from tests.integration.conftest import assert_all_refused, ran, refused
from tests.support.own_data import write
from tests.support.pico import pico_base, pico_tokenizer

STAGES = ["text", "train", "control", "evaluate", "export"]
SMALL = (
    "train.read_steps=2",
    "train.steps=3",
    "train.sources.0.rows=4",
    *(f"train.sources.{i}.rows=2" for i in (2, 3, 4, 5)),
    "train.sources.1={base_text: 3, rows: 2, max_tokens: 20, weights: {base_kl: 1.0}}",
    "train.sources.0.data.holdout=0.3",
    "evaluate={pairs: [4], examples: 12, sentences: 8}",
)
CONTROL = "control={model: ./base}"


def line(number: int) -> dict[str, Any]:
    prompt = f"fox:{number}\nowl:{number + 1}\nWhere is the owl?\n"
    start = prompt.index("owl:") + 4
    return {"prompt": prompt, "answer": str(number + 1), "answer_span": [start, start + len(str(number + 1))]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a hybrid made of it, and a user's lines."""
    cwd = tmp_path_factory.mktemp("finetune")
    base = pico_base(vocab_size=1024, layers=2)
    site = family_of(base.config).sites(base.config)[1]
    plan = Plan("base", geometry_of(base.config), (Graft(site, (2,), "add", "ssm", ("answer_token",)),), 0)
    for name, model in (("base", base), ("hybrid", splice_model(base, plan))):
        model.save_pretrained(cwd / name)
        pico_tokenizer().save_pretrained(cwd / name)
    write(cwd / "rows.jsonl", [line(i) for i in range(60)])
    return cwd


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """The run folder of a finished fine-tuning with a control."""
    done = ran("finetune", "./hybrid", "rows.jsonl", CONTROL, *SMALL, cwd=place)
    assert [row.split()[0] for row in done.stdout.splitlines() if " done in " in row] == STAGES
    assert "rows.jsonl, held-out rows, exact match" in done.stdout
    return place / "runs" / "finetune-rows"


def test_every_arm_is_asked_the_rows_that_were_held_out(place: Path, finished: Path) -> None:
    """Both arms were trained, and the hybrid that it starts from was not touched."""
    results = json.loads((finished / "results.json").read_text())
    assert set(results["arms"]) == {"base", "no_splice", "hybrid_heads_off", "hybrid"}
    for arm in results["arms"].values():
        entry = arm["held_out"]["rows.jsonl"]
        assert entry["n"] == 12 and 0 <= entry["low"] <= entry["accuracy"] <= entry["high"] <= 1
    assert "held_out/rows.jsonl" in results["comparisons"]["hybrid"]["no_splice"]
    assert results["step_zero_gap"] is None and results["heads"] == ["L1H2"] and "answer_spans" not in results
    assert set(results["seconds"]) == {"text", "train", "control", "evaluate"}
    for name, trained in (("base", "no_splice"), ("hybrid", "trained")):
        before = load_file(place / name / "model.safetensors")
        after = load_file(finished / trained / "model.safetensors")
        assert set(after) == set(before)
        assert all((after[n] != weight).any() for n, weight in before.items() if "in_proj" in n), name
    assert not (finished / "heads.json").exists(), "the hybrid's folder had none"
    written = (finished / "base_text.jsonl").read_text().splitlines()
    assert len(written) == 3 and all(json.loads(row)["text"] for row in written)


def test_the_export_says_what_it_was_made_of(place: Path, finished: Path) -> None:
    export = finished / "export"
    card = (export / "README.md").read_text()
    assert "Fine-tuned from hybrid on rows.jsonl" in card and "| rows.jsonl, held-out rows, exact match |" in card
    assert "| **hybrid** | control (base, same training) | before fine-tuning | hybrid, attention off |" in card
    recipe = yaml.safe_load((export / "recipe.yaml").read_text())
    assert (recipe["base"]["model"], recipe["control"]["model"], recipe["splice"]) == ("hybrid", "base", None)
    assert recipe["train"]["sources"][0]["data"]["path"] == "rows.jsonl"
    assert str(place) not in card + (export / "recipe.yaml").read_text()
    report = json.loads((export / "export.json").read_text())
    assert report["checked_without_surgery"] and report["max_logit_difference"] == 0


def test_a_second_data_set_does_not_replace_the_first(place: Path, finished: Path) -> None:
    """It has a folder of its own. In the same folder it asks for --overwrite."""
    write(place / "more" / "rows.jsonl", [line(i) for i in range(5, 60)])
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    line_of_refusal = refused("finetune", "./hybrid", "more/rows.jsonl", *SMALL, cwd=place)
    said = ("finetune-rows", "another recipe", "data: rows.jsonl", "--overwrite")
    assert [word for word in said if word not in line_of_refusal] == []
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def unmarked(number: int) -> dict[str, Any]:
    """A line without a span. In every third, the answer occurs twice or not at all."""
    row = line(number)
    del row["answer_span"]
    if number % 6 == 0:
        row["prompt"] = f"yak:{row['answer']}\n{row['prompt']}"
    elif number % 6 == 3:
        row["answer"] = f"x{row['answer']}"
    return row


def test_lines_without_spans_are_searched_counted_and_shown(place: Path) -> None:
    rows = [unmarked(i) for i in range(60)]
    write(place / "plain.jsonl", rows)
    done = ran("finetune", "./hybrid", "plain.jsonl", *SMALL, "--runs", "plain", cwd=place)
    folder = place / "plain" / "finetune-plain"
    results = json.loads((folder / "results.json").read_text())
    trained = [i for i, row in enumerate(rows) if not is_held_out(row["prompt"], 0.3)]
    groups = [sum(i % 6 == rest for i in trained) for rest in (0, 3)]
    counts = {"found": len(trained) - sum(groups), "ambiguous": groups[0], "missing": groups[1]}
    assert results["answer_spans"] == {"plain.jsonl": counts} and min(counts.values()) > 0
    told = "ambiguous: {ambiguous}, missing: {missing}, found: {found}".format(**counts)
    assert done.stdout.count(told) == 1 and told in (folder / "report.html").read_text()
    losses = json.loads((folder / "training.json").read_text())
    assert len(losses) == 5 and all(step["attention"] > 0 for step in losses)
    assert [list(step)[1:3] for step in losses[:2]] == [["loss", "attention"]] * 2, "the read stage"

    entry = results["arms"]["hybrid"]["held_out"]["plain.jsonl"]
    assert entry["loss"]["nats"] > 0 and entry["loss"]["tokens"] > entry["n"] == entry["first_token"]["n"]
    assert all(arm["held_out"]["plain.jsonl"]["accuracy"] == 0 for arm in results["arms"].values()), "of 3 steps"
    report = (folder / "report.html").read_text()
    for shown in (report, " ".join(done.stdout.split())):
        assert f"no model generates any of the {entry['n']} held-out answers" in shown
        assert "train longer (now 3 steps): repeat the command with train.steps=6" in shown

    held_out = {row["prompt"]: row["answer"] for i, row in enumerate(rows) if i not in trained}
    examples = results["held_out_examples"]["plain.jsonl"]
    assert len(examples) == entry["n"] == min(12, len(held_out))
    assert all(held_out[e["prompt"]] == e["wanted"] for e in examples)
    assert all(set(e["generated"]) == set(results["arms"]) for e in examples)
    prompt = examples[0]["prompt"].replace("\n", "\\n")
    assert prompt in report and prompt[:20] in done.stdout
    export = folder / "export"
    assert "held_out_examples" not in json.loads((export / "results.json").read_text())
    for name in ("results.json", "report.html", "README.md"):
        assert prompt[:20] not in (export / name).read_text(), "an export holds no rows"
    assert told in (export / "report.html").read_text()


def test_bad_input_is_one_line_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    for name in ("base", "hybrid", "rows.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    write(tmp_path / "bad.jsonl", [line(0), line(1), {"prompt": "Who?\n"}])
    write(tmp_path / "one.jsonl", [line(0)])
    given = {
        ("./base", "rows.jsonl"): ("HYBRID", "Nothing is spliced", "splice it first"),
        ("./nowhere", "rows.jsonl"): ("HYBRID", "no such folder"),
        ("./hybrid", "missing.jsonl"): ("DATA", "missing.jsonl", "No such file"),
        ("./hybrid", "bad.jsonl"): ("bad.jsonl:3", "answer"),
        ("./hybrid", "one.jsonl"): ("one.jsonl", "no row is", "holdout"),
        ("./hybrid", "rows.jsonl", "control={model: ./hybrid}"): ("control.model", "without a splice"),
        ("./hybrid", "rows.jsonl", "--to", "splice"): ("--to", "splice", "hybrid already"),
    }
    assert_all_refused({("finetune", *words, *SMALL): said for words, said in given.items()}, tmp_path)
