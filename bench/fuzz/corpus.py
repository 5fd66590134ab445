"""Valid inputs that cases start from: models of every family, an export, a finished run, data in every format.

`python -m bench.fuzz.corpus FOLDER` writes them in a separate process, because the process that forks must not compute.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.fuzz.values import ROOT

BASE, EXPORT = ROOT / "checkpoints" / "pico-mamba2", ROOT / "checkpoints" / "quickstart" / "export"
RECIPES = ROOT / "recipes"
# The quickstart with as little of everything as it goes through with, in three seconds.
TINY = (
    f"base.model={BASE}",
    "locate={pairs: 40, examples: 8, batch_size: 8, methods: [sharpen]}",
    "splice.select=sharpen",
    "train.steps=4",
    "train.save_every=1",
    "train.sources=[{task: kv_retrieval, pairs: [4, 6], rows: 2, weights: {answer: 2.0, attention: 1.0}},"
    " {task: sentence, split: 0, rows: 2, weights: {base_kl: 1.0}}]",
    "evaluate={tasks: [kv_retrieval], pairs: [4], examples: 4, sentences: 4}",
)


class Corpus:
    """Good inputs, written when they are first needed; nothing below `root` is ever changed.

    `models/NAME`, `sharded`, `mamba_ssm/NAME`, `hybrid`, `data` and `runs/quickstart`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipes = {path.name: path.read_text() for path in sorted(RECIPES.glob("*.yaml"))}
        from surgery.recipe import load_recipe  # no torch

        recipe = load_recipe(RECIPES / "quickstart.yaml").model_dump(mode="json")
        self.keys = tuple(sorted(_dotted(recipe)))

    def folder(self, name: str) -> Path:
        """One of the good inputs."""
        if not self.root.is_dir():
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", __name__, str(self.root)]
            subprocess.run(command, check=True, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        return self.root / name

    def folders(self, *patterns: str) -> list[Path]:
        """All that match, in order."""
        return sorted(path for pattern in patterns for path in self.folder(".").glob(pattern))


def write(root: Path) -> None:
    """All inputs; a dozen seconds."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch

    torch.set_num_threads(1)
    _write_models(root)
    _write_data(root / "data")
    _write_run(root)


def _write_models(root: Path) -> None:
    from surgery.models.lookup import family_of, geometry_of
    from surgery.splice.graft import splice_model
    from surgery.types import Graft, Plan
    from tests.support import mamba_ssm_files
    from tests.support.pico import SPLICED_FAMILIES, pico_base, pico_family, pico_tokenizer

    for name in SPLICED_FAMILIES:
        model = pico_family(name, vocab_size=1024)
        model.save_pretrained(root / "models" / name)
        site = family_of(model.config).sites(model.config)[0]
        plan = Plan("base", geometry_of(model.config), (Graft(site, (0,), "add", "ssm", ("answer_token",)),), 0)
        splice_model(model, plan).config.save_pretrained(root / "models" / f"{name}_hybrid")
    base = pico_base(vocab_size=1024, layers=2)
    site = family_of(base.config).sites(base.config)[1]
    plan = Plan("base", geometry_of(base.config), (Graft(site, (2,), "add", "ssm", ("answer_token",)),), 0)
    base.save_pretrained(root / "sharded", max_shard_size="40KB")
    splice_model(base, plan).save_pretrained(root / "hybrid")
    for folder in (*root.glob("models/*"), root / "sharded", root / "hybrid"):
        pico_tokenizer().save_pretrained(folder)
    for layer in ("Mamba1", "Mamba2"):
        for kind in mamba_ssm_files.KINDS:
            mamba_ssm_files.write(root / "mamba_ssm" / f"{layer} {kind}", mamba_ssm_files.tiny(layer), kind)


def _write_data(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for i in range(40):
        prompt = f"fox:{i}\nowl:{i + 1}\nWhere is the owl?\n"
        start = prompt.index("owl:") + 4
        rows.append({"prompt": prompt, "answer": str(i + 1), "answer_span": [start, start + len(str(i + 1))]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    odd: dict[str, Any] = {
        "numbers": [1, 2, None],
        "nested": [{"a": [1]}, None, {"a": []}],
        "bytes": [b"\xff\xfe", b"", None],
        "lists": [["x"], [], None],
        "floats": [float("nan"), 1.0, None],
    }
    for name, column in odd.items():
        table = pa.table({"prompt": pa.array(column), "answer": pa.array(["1", "2", "3"])})
        pq.write_table(table, folder / f"{name}.parquet")
    pq.write_table(
        pa.table({"prompt": pa.array(["a", "b"]).dictionary_encode(), "answer": ["1", "2"]}), folder / "words.parquet"
    )
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "empty.parquet")
    pq.write_table(pa.table({}), folder / "columnless.parquet")


def _write_run(root: Path) -> None:
    """A finished run."""
    from surgery.recipe import load_recipe
    from surgery.run.pipeline import run_pipeline

    run_pipeline(load_recipe(RECIPES / "quickstart.yaml", TINY), root / "runs" / "quickstart")


def _dotted(data: Any, prefix: str = "") -> list[str]:
    if not isinstance(data, dict | list) or not data:
        return [prefix]
    items = data.items() if isinstance(data, dict) else enumerate(data)
    own = [prefix] if prefix else []
    return own + [key for name, value in items for key in _dotted(value, f"{prefix}.{name}" if prefix else str(name))]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    beside = target.with_name(target.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    beside.rename(target)
