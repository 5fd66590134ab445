"""A run whose training ends at a plateau: the control trains as many steps, and the report says where it was."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.conftest import run_small

ENDS = (
    "locate.methods=[patching, sharpen]",
    "train.steps=30",
    "train.plateau={window: 1, patience: 1, threshold: 0.0, min_steps: 4}",
    "train.optimizer={schedule: wsd, decay: 0.3, warmup: 1}",
    "evaluate.tasks=[kv_retrieval]",
    "evaluate.pairs=[4]",
    "evaluate.efficiency=null",
    "evaluate.generate=[]",
)


def test_a_run_ends_at_a_plateau(tmp_path: Path) -> None:
    done = run_small(tmp_path, *ENDS, options=("--to", "evaluate"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "quickstart"
    names = ("training", "no_splice_training", "plateau", "results")
    hybrid, control, steps, results = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    (entry,) = (entry for entry in hybrid if "last_step" in entry)
    assert [len(hybrid), len(control)] == [entry["last_step"]] * 2 and 4 <= entry["step"] < len(hybrid) < 30
    assert not any("last_step" in entry for entry in control), "the control looks for no plateau"
    assert steps == results["training"] == {"finetune": {"steps": len(hybrid), "plateau": entry["step"]}}
    text = f"{len(hybrid)} steps (of at most 30; plateau at step {entry['step']})"
    assert text in (folder / "report.html").read_text()
    assert "last_step" not in (folder / "figures" / "training" / "training.svg").read_text()
