"""A recipe with the keys of version 0.1 runs, trains the same weights, and shares its folder with the present one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.conftest import RECIPE, SMALL, surgery

OLD = {
    "base_kl:": "keep:",
    "train_eos:": "end:",
    "split:": "half:",
    "  steps: 250\n": "  steps: 250\n  trains: all\n  no_splice: true\n",
}


def test_an_old_recipe_trains_the_same_weights(finished: Path, tmp_path: Path) -> None:
    text = RECIPE.read_text()
    for new, old in OLD.items():
        assert new in text
        text = text.replace(new, old)
    (tmp_path / "old.yaml").write_text(text)
    done = surgery("run", "old.yaml", *SMALL, "--to", "train", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    warned = sorted(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    names = ("train.no_splice", "train.sources.end", "train.sources.half", "train.sources.weights.keep", "train.trains")
    assert [line.split()[1] for line in warned] == list(names), "one line for each key"
    run = tmp_path / "runs" / "quickstart"
    for file in ("trained/model.safetensors", "spliced/model.safetensors"):
        assert (run / file).read_bytes() == (finished / file).read_bytes()
    stages = ("locate", "plan", "splice", "train")
    keys = [{s: json.loads((r / ".stages" / f"{s}.json").read_text())["key"] for s in stages} for r in (run, finished)]
    assert keys[0] == keys[1], "a folder of one is fresh for the other"
