"""What the terminal shows of a user's own rows: text as text, in cells that fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from surgery.commands.tables import print_comparison, print_heads, print_results
from tests.support.reports import spliced

SHARE = {"accuracy": 0.0, "low": 0.0, "high": 0.1, "n": 40}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entry = {**SHARE, "first_token": {**SHARE, "accuracy": 0.25}, "loss": {"nats": 1.2345, "tokens": 80}}
    texts = {"base": "[bold]b[/bold]", "no_splice": "unseen", "hybrid": ":q:\x1b[2J" + "z" * 99}
    results = {
        "heads": ["L1H2"],
        "arms": {name: {"held_out": {"rows.jsonl": entry}, "perplexity": 2.0} for name in ("base", "hybrid")},
        "held_out_examples": {"rows.jsonl": [{"prompt": "a\n" * 99, "wanted": "[red]", "generated": texts}]},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    return tmp_path


def test_wanted_and_generated_text_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_results(folder, spliced("m"))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    (row,) = (line for line in lines if "[red]" in line)
    assert "[bold]b[/bold]" in row and ":q:\\x1b[2J" in row and " ... " in row and "unseen" not in shown
    assert "\x1b" not in shown and max(map(len, lines[:-2])) <= 140
    assert lines[-2].startswith("rows.jsonl: no model generates any of the 40 held-out answers exactly.")
    head = next(line for line in lines if line.startswith("┃ prompt"))
    assert head.index("wanted") < head.index("base") < head.index("hybrid")
    arms = next(line for line in lines if line.startswith("┃"))
    assert arms.index("hybrid") < arms.index("base")
    (first,) = (line for line in lines if "rows, first token" in line)
    (loss,) = (line for line in lines if "nats per answer token" in line)
    assert first.count("0.250") == 2 and loss.count("1.234") == 2


def test_the_last_lines_are_the_verdict_the_report_and_what_is_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_results(folder, spliced("m"))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("No model is right on any of the 40 held-out rows: rows.jsonl"), "no report, no export"
    export = folder / "export"
    export.mkdir()
    for path in (folder / "report.html", export / "export.json"):
        path.write_text("{}")
    print_results(folder, spliced("m"))
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[:2] == [f"report: {folder / 'report.html'}", "next:"]
    commands = [shlex.split(line) for line in lines[2:]]
    assert [command[:3] for command in commands] == [
        ["surgery", name, str(export)] for name in ("generate", "finetune", "publish")
    ]
    assert commands[1][3:] == ["DATA.jsonl"]
    results = json.loads((folder / "results.json").read_text())
    texts = {"hybrid": " 42", "base": "\x1b[2J"}
    results["example"] = {"prompt": "it's\n1: ", "wanted": "42", "generated": texts}
    (folder / "results.json").write_text(json.dumps(results))
    print_results(folder, spliced("m"))
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert shlex.split(lines[0]) == ["surgery", "generate", str(export), "it's\\n1: "], "read back by `generate`"
    assert lines[1].strip() == "wanted 42; hybrid 42; base \\x1b[2J"
    for prompt in ("-1", "a\\b", "\x1b[2J"):
        (folder / "results.json").write_text(
            json.dumps({**results, "example": {**results["example"], "prompt": prompt}})
        )
        print_results(folder, spliced("m"))
        assert shlex.split(capsys.readouterr().out.splitlines()[-3])[-1] == "PROMPT", "not what a shell would pass on"
    (export / "export.json").write_text('{"format": "nemotron_h"}')  # inserted layers have no other format
    print_results(folder, spliced("m"))
    assert "DATA.jsonl export.format=nemotron_h" in capsys.readouterr().out


def test_names_in_brackets_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a[v1]", "a[v2]", "x[/a]:smile:"]
    entry = {"kv_retrieval": {"8": SHARE}}
    comparison = {"arms": dict.fromkeys(names, entry), "comparisons": {}, "skipped": {"s": "skipped [b]"}}
    print_comparison(comparison, tmp_path / "out[1]")
    shown = capsys.readouterr().out
    for name in (*names, "out[1]", "s: skipped [b]"):
        assert name in shown.replace("\n", ""), name
    assert "differs" not in shown


def test_a_comparison_explains_its_marks_and_names_what_lm_eval_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = {"winogrande": {"skipped": "no data"}, "own": {"acc,none": 0.25, "acc_stderr,none": 0.1, "n": 8}}
    arms = {name: {"kv_retrieval": {"8": SHARE}, "lm_eval": harness} for name in "ab"}
    tests = {"b": {"a": {"kv_retrieval/8": {"significant": True}}}}
    print_comparison({"arms": arms, "comparisons": tests, "skipped": {}}, tmp_path)
    shown = capsys.readouterr().out
    assert "* differs from a" in shown and "lm-eval did not run winogrande: no data" in shown
    assert "own (lm-eval), acc" in shown and "0.250" in shown and "stderr" not in shown


def test_scores_of_all_heads_are_shown_and_passes_are_those_of_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best head by one method may lack the scores of another one, and a chosen one may be far down."""
    scores = [{"patching": 2.0}, {"patching": 1.0, "trial": 0.5}, *[{"patching": 0.5}] * 20]
    heads = [
        {"head": f"L0H{i}", "role": "neither", "reads": None}
        | {"scores": {name: {"value": x, "low": x, "high": x} for name, x in row.items()}}
        for i, row in enumerate(scores)
    ]
    found = {"heads": heads, "chosen": [heads[0], heads[15]], "groups": [], "method": "patching"}
    (tmp_path / "heads.json").write_text(json.dumps({**found, "clean": {"accuracy": {"value": 0.9}}}))
    cost = {"prompts": 48, "passes": 172, "seconds": 3.0, "peak_bytes": 0}
    (tmp_path / "locate.json").write_text(json.dumps(cost))
    print_heads(tmp_path)
    shown = capsys.readouterr().out
    assert "trial" in shown and "+0.500" in shown
    assert "L0H15 *" in shown and "L0H9 " in shown and "L0H10" not in shown, "ten heads, and every chosen one"
    assert "3.6 forward passes per prompt" in shown
