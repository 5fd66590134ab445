"""Code from outside this package adds one of each: a test runs the example of every section of docs/EXTENDING.md."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from tests.integration.conftest import PICO_MAMBA2, ROOT, ran, refused, with_path
from tests.support import processes
from tests.support.exports import list_again
from tests.support.pico import pico_base, pico_tokenizer


def block(heading: str, language: str = "python") -> str:
    """The only code block of `language` in a section of docs/EXTENDING.md, without its fences: at most 40 lines.

    Args:
        heading: the section's title, such as `A probe`.
        language: what stands behind the opening fence.
    """
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", sections[heading], re.S | re.M)
    assert sum(bool(line.strip()) for line in found.splitlines()) <= 40, heading
    return found


# What a recipe needs for a run of seconds, beside the section's own keys: one listed head, one step, one probe.
TINY = """
name: tiny
base: {model: ./base}
locate: {methods: [sharpen], pairs: 4, examples: 2, batch_size: 2}
splice: {select: list, heads: [L1H2]}
train: {steps: 1, control: false, sources: [{task: kv_retrieval, rows: 2, weights: {answer: 1.0}}]}
evaluate: {tasks: [kv_retrieval], pairs: [4], examples: 2, sentences: 2}
"""


def write_base(folder: Path) -> None:
    pico_base(vocab_size=1024, layers=2).save_pretrained(folder / "base")
    pico_tokenizer().save_pretrained(folder / "base")


def ran_recipe(folder: Path, heading: str, *words: str, command: str = "run", **more: Any) -> Path:
    """The folder of a tiny run of a pico base, with the keys of a section of the page, and `more` by section."""
    write_base(folder)
    recipe = yaml.safe_load(TINY) | yaml.safe_load(block(heading, "yaml"))
    for section, fields in more.items():
        recipe[section] = recipe.get(section, {}) | fields
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ran(command, "recipe.yaml", *words, cwd=folder, path=folder)
    return folder / "runs" / "tiny"


def test_a_probe_from_outside(tmp_path: Path) -> None:
    """A recipe trains on it and evaluates it; its label is in the report, and lm-eval's files are written."""
    (tmp_path / "reversal.py").write_text(block("A probe"))
    (tmp_path / "stock.py").write_text(block("A probe", 'python title="stock.py"'))
    few = {"pairs": [4], "examples": 4, "sentences": 4}
    run = ran_recipe(tmp_path, "A probe", "--to", "evaluate", train={"steps": 2, "control": False}, evaluate=few)
    results = json.loads((run / "results.json").read_text())
    for arm in ("base", "hybrid"):
        assert results["arms"][arm]["reversal"]["5"]["n"] == 4
        assert "per_token" in results["arms"][arm]["reversal"]["3"]
    assert "reversal/5" in results["comparisons"]["hybrid"]["base"]
    report = (run / "report.html").read_text()
    assert "reversed copying, 5" in report and "KV-retrieval, 4 pairs" in report
    assert results["arms"]["hybrid"]["stock"]["4"]["n"] == 4 and "table look-up, 4 rows" in report
    history = json.loads((run / "training.json").read_text())
    assert all(entry["attention"] > 0 for entry in history), "its gold positions are trained on"

    _, _, script = shlex.split(block("A probe", "bash"))
    made = processes.run(["-c"], tmp_path, with_path(tmp_path), script=script)
    assert made.returncode == 0, made.stderr[-2000:]
    group = yaml.safe_load((tmp_path / "tasks" / "surgery_retrieval.yaml").read_text())
    for task in ("reversal_4_generated", "reversal_16_generated", "copying_8_generated", "stock_4", "stock_12"):
        assert f"surgery_{task}" in group["task"], task
    row = json.loads((tmp_path / "tasks" / "stock_12.jsonl").read_text().splitlines()[0])
    wanted = row["prompt"].split()[-2]
    assert f"{wanted}:{row['choices'][row['gold']]}," in row["prompt"] and row["bounded"]
    row = json.loads((tmp_path / "tasks" / "reversal_4.jsonl").read_text().splitlines()[0])
    words = row["prompt"].split("\n")[1].split(" ")
    assert len(words) == 4 and row["answers"] == [" ".join(reversed(words))]


def test_an_objective_from_outside(tmp_path: Path) -> None:
    """A recipe gives it a weight; its curve is in training.json and in the figure."""
    (tmp_path / "smoothing.py").write_text(block("An objective"))
    folder = ran_recipe(tmp_path, "An objective", "--to", "train", train={"steps": 3, "micro_batch": 2})
    history = json.loads((folder / "training.json").read_text())
    uniform = math.log(1024)
    for entry in history:
        assert entry["loss"] == pytest.approx(entry["answer"] + entry["label_smoothing"])
        assert entry["label_smoothing"] > 0.1 * uniform, "only a uniform prediction costs as little as log V"
    rows = list(csv.DictReader((folder / "figures" / "training" / "training.csv").read_text().splitlines()))
    assert [float(row["label_smoothing"]) for row in rows] == [entry["label_smoothing"] for entry in history]
    line = refused("validate", "recipe.yaml", "plugins=[]", cwd=tmp_path, path=tmp_path)
    assert "weights.label_smoothing" in line and "Unknown objective" in line


def test_an_installed_plugin_is_in_the_schema(tmp_path: Path) -> None:
    """An entry point of the group `surgery.plugins` is loaded without a recipe that names it."""
    (tmp_path / "reversal.py").write_text(block("A probe"))
    installed = tmp_path / "reversal-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: reversal\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[surgery.plugins]\nreversal = reversal\n")
    done = ran("schema", cwd=tmp_path, path=tmp_path)
    assert '"reversal"' in done.stdout


def test_an_export_format_from_outside(tmp_path: Path) -> None:
    """A run writes it; `verify` needs the plugin on the command line, names it, and imports nothing on its own."""
    (tmp_path / "npz_format.py").write_text(block("An export format"))
    run = ran_recipe(tmp_path, "An export format")
    weights = load_file(run / "trained" / "model.safetensors")
    with np.load(run / "export" / "weights.npz") as arrays:
        assert all(np.array_equal(arrays[name], tensor.numpy()) for name, tensor in weights.items())
    record = json.loads((run / "export" / "export.json").read_text())
    assert (record["format"], record["plugin"]) == ("npz", "npz_format") and "weights.npz" in record["files"]
    assert "numpy.load" in (run / "export" / "README.md").read_text()

    # A stranger's copy, with a module of the recorded name inside: it must not be imported.
    copy = Path(shutil.copytree(run / "export", tmp_path / "copy"))
    mark = tmp_path / "it ran"
    (copy / "npz_format.py").write_text(f"open({str(mark)!r}, 'w')")
    assert "pass --plugin npz_format" in refused("verify", ".", cwd=copy) and not mark.exists()
    (copy / "npz_format.py").unlink()

    verify = ("verify", str(copy), "--plugin", "npz_format")
    verified = ran(*verify, cwd=tmp_path, path=tmp_path)
    assert f"{len(record['files'])} files" in verified.stdout and "plan.json, heads.json, README.md" in verified.stdout
    (copy / "other.npz").write_bytes(b"")
    assert refused(*verify, cwd=tmp_path, path=tmp_path).startswith("error: other.npz: not listed")
    (copy / "other.npz").unlink()
    changed = dict(np.load(copy / "weights.npz")) | {"lm_head.weight": np.zeros(3)}
    np.savez(copy / "weights.npz", **changed)
    assert "weights.npz" in refused(*verify, cwd=tmp_path, path=tmp_path)
    assert "no_such_module" in refused("verify", str(copy), "--plugin", "no_such_module", cwd=tmp_path)
    assert "Did you mean npz?" in refused("run", "recipe.yaml", "export.format=nzp", cwd=tmp_path, path=tmp_path)


def test_a_locating_method_from_outside(tmp_path: Path) -> None:
    """Its column is in every file that locating writes, and it chooses the head."""
    (tmp_path / "direct_logits.py").write_text(block("A locating method"))
    (tmp_path / "value_ablation.py").write_text(block("A locating method", 'python title="value_ablation.py"'))
    more = {"base": {"model": str(PICO_MAMBA2)}, "locate": {"pairs": 16, "examples": 16}}
    folder = ran_recipe(tmp_path, "A locating method", command="locate", **more)

    heads = json.loads((folder / "heads.json").read_text())
    scores = [head["scores"]["direct_logits"] for head in heads["heads"]]
    assert len(scores) == 32 and all(score["n"] == 16 and score["low"] < score["high"] for score in scores)
    values = [score["value"] for score in scores]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    assert heads["method"] == "direct_logits" and heads["chosen"] == heads["heads"][:1]
    with (folder / "heads.csv").open(newline="") as file:
        assert [float(row["direct_logits"]) for row in csv.DictReader(file)] == values
    for head in heads["heads"]:
        assert head["scores"]["at_value"]["n"] == head["scores"]["at_value_accuracy"]["n"] == 16
    maps = folder / "figures" / "locate" / "head_maps"
    assert "direct_logits_low" in maps.with_suffix(".csv").read_text().splitlines()[0]
    page = (folder / "locate.html").read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])
    captions = {column["key"]: column["caption"] for column in data["columns"]}
    assert captions["at_value"] == "Answer margin (logits) lost with the head ablated at the value."
    (column,) = [column for column in data["columns"] if column["key"] == "direct_logits"]
    assert (column["label"], column["unit"]) == ("direct logits", "dot product")
    assert column["caption"].startswith("Dot product: what it adds at the query")
    assert data["units"]["dot product"] == {"title": "Dot product", "digits": 3}


def test_a_family_from_outside(tmp_path: Path) -> None:
    """A run on it, and an export that loads without this library. bench/nightly runs the families' tests on it."""
    files = {name: block("A model family", f'python title="{name}.py"') for name in ("twin_hybrid", "twin_family")}
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    write_base(tmp_path)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": "twin"}))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(TINY) | {"plugins": ["twin_family"]}))
    ran("run", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    export = tmp_path / "runs" / "tiny" / "export"
    exported = json.loads((export / "config.json").read_text())
    assert exported["auto_map"]["AutoConfig"] == "twin_hybrid.TwinMambaHybridConfig"
    assert "from .modeling_mamba2_hybrid import" in (export / "twin_hybrid.py").read_text()
    verified = ran("verify", str(export), "--plugin", "twin_family", cwd=tmp_path, path=tmp_path)
    assert "in stock transformers" in verified.stdout
    line = refused("verify", str(export), cwd=tmp_path)
    assert "twin_hybrid" in line and "EXTENDING.md" in line


def test_an_attention_branch_from_outside(tmp_path: Path) -> None:
    """A run splices, trains and exports it; the export brings its file, which only a plugin or trust lets run."""
    (tmp_path / "cosine_attention.py").write_text(block("An attention branch"))
    export = ran_recipe(tmp_path, "An attention branch") / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["splice"][0]["init"] == "cosine" and config["splice"][0]["temperature"] == 0.1
    assert config["auto_map"]["AutoModelForCausalLM"] == "hybrid_with_branches.Mamba2HybridForCausalLM"
    assert "from .modeling_hybrid import SplicedAttention" in (export / "cosine_attention.py").read_text()
    weights = load_file(export / "model.safetensors")
    assert weights["backbone.layers.1.mixer.attention.o_proj.weight"].any(), "it was trained"

    line = refused("verify", str(export), cwd=export.parent)
    assert "cosine" in line and "--plugin" in line and "--trust-remote-code" in line
    for words, path in ((["--plugin", "cosine_attention"], tmp_path), (["--trust-remote-code"], None)):
        assert "in stock transformers" in ran("verify", str(export), *words, cwd=export.parent, path=path).stdout
    # With the plugin, a changed file is refused before it runs.
    mark = tmp_path / "it ran"
    copy = Path(shutil.copytree(export, tmp_path / "copy"))
    with open(copy / "cosine_attention.py", "a") as file:
        file.write(f"open({str(mark)!r}, 'w').close()\n")
    list_again(copy)
    line = refused("verify", str(copy), "--plugin", "cosine_attention", cwd=copy.parent, path=tmp_path)
    assert "cosine_attention.py" in line and not mark.exists()
