"""`surgery show`: which folder it finds, what it prints, and the completion of run names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surgery.commands.show import show
from surgery.errors import RunError
from surgery.recipe import Recipe, to_yaml
from tests.support.reports import spliced

SHARE = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 40}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, one without results, and a comparison."""
    arms = {name: {"kv_retrieval": {"8": SHARE}, "perplexity": 2.0} for name in ("base", "hybrid")}
    for name in ("first", "begun", "compare"):
        (tmp_path / name / ".stages").mkdir(parents=True)
        (tmp_path / name / "recipe.yaml").write_text(to_yaml(spliced("m")))
    (tmp_path / "first" / "results.json").write_text(json.dumps({"heads": ["L1H2"], "arms": arms}))
    comparison = {"arms": arms, "comparisons": {}, "skipped": {}}
    (tmp_path / "compare" / "results.json").write_text(json.dumps(comparison))
    (tmp_path / "compare" / ".surgery.json").write_text('{"kind": "comparison", "version": "0"}')
    return tmp_path


def test_a_run_is_found_by_its_name_and_by_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("first", runs)
    by_name = " ".join(capsys.readouterr().out.split())  # the folder's name may wrap the line
    assert "heads L1H2" in by_name and "KV-retrieval, 8 pairs" in by_name and "not significantly better" in by_name
    show(str(runs / "first"), Path("elsewhere"))
    assert " ".join(capsys.readouterr().out.split()) == by_name
    # The shipped example has a recipe in its export alone.
    (runs / "first" / "export").mkdir()
    (runs / "first" / "recipe.yaml").rename(runs / "first" / "export" / "recipe.yaml")
    show("first", runs)
    assert "KV-retrieval, 8 pairs" in " ".join(capsys.readouterr().out.split())
    show("compare", runs)
    assert "figures: " in capsys.readouterr().out, "a run has a verdict instead"


def trained_with(pairs: int) -> Recipe:
    source = {"task": "kv_retrieval", "rows": 2, "pairs": pairs, "weights": {"answer": 1}}
    return spliced("m", {"sources": [source]})


def test_results_are_judged_with_the_recipe_that_they_were_made_with(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later run with more pairs ended before its evaluation. The largest trained number of pairs is judged."""
    run = runs / "first"
    results = json.loads((run / "results.json").read_text())
    for arm in results["arms"].values():
        arm["kv_retrieval"]["64"] = {**SHARE, "accuracy": 0.1, "low": 0.05, "high": 0.2}
    sentences = []
    for of_results, of_folder in ((8, 8), (8, 64), (None, 64)):  # None: results of an earlier version
        recipe = {} if of_results is None else {"recipe": trained_with(of_results).model_dump(mode="json")}
        (run / "results.json").write_text(json.dumps({**results, **recipe}))
        (run / "recipe.yaml").write_text(to_yaml(trained_with(of_folder)))
        show("first", runs)
        sentences.append(" ".join(capsys.readouterr().out.split()).partition("The hybrid is ")[2])
    assert "than the base: KV-retrieval, 8 pairs, 50.0%" in sentences[0] == sentences[1]
    assert "than the base: KV-retrieval, 64 pairs, 10.0%" in sentences[2]


def test_what_cannot_be_shown_is_refused(runs: Path) -> None:
    for run, words in (("firts", "Did you mean first?"), ("zzz", "no such folder"), ("begun", "no results yet")):
        with pytest.raises(RunError, match=words):
            show(run, runs)
    gone = '{"recipe": {"name": "a", "base": {"model": "m"}, "locate": {"gone": 1}}}'  # a key of another version
    for text in ("{", "[]", '{"arms": 3}', '{"recipe": 3}', '{"heads": [], "arms": {"hybrid": 1}}', gone):
        (runs / "first" / "results.json").write_text(text)
        with pytest.raises(RunError, match=r"results\.json"):
            show("first", runs)


def test_a_shell_completes_names_of_runs(runs: Path) -> None:
    code = "import sys; sys.argv = ['surgery']; from surgery.__main__ import main; main()"
    words = {"COMP_WORDS": f"surgery show --runs {runs} f", "COMP_CWORD": "4", "_SURGERY_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["first"], done.stderr
