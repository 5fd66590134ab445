"""Code from outside this package adds one of each: a test runs the example of every section of docs/EXTENDING.md."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from tests.integration.conftest import PICO_MAMBA2 as BASE
from tests.integration.conftest import ROOT
from tests.support.exports import list_again
from tests.support.pico import pico_base, pico_tokenizer
from tests.support.processes import library

HEADINGS = (
    "A probe",
    "An objective",
    "A locating method",
    "A model family",
    "An attention branch",
    "An export format",
)


def block(heading: str, language: str = "python") -> str:
    """The only code block of `language` in a section of docs/EXTENDING.md, without its fences.

    Args:
        heading: the section's title, such as `A probe`.
        language: what stands behind the opening fence.
    """
    return block_in((ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8"), heading, language)


def block_in(text: str, heading: str, language: str) -> str:
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", sections[heading], re.S | re.M)
    assert len(blocks) == 1, f"the section '{heading}' has {len(blocks)} blocks of {language}, not one"
    return blocks[0]


def test_the_sections_stand_in_their_order() -> None:
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    assert [heading for heading in re.findall(r"^## (.+)$", text, re.M) if heading in HEADINGS] == list(HEADINGS)


def test_a_block_is_the_one_under_its_heading() -> None:
    text = "# T\n\n## One\n```python\na = 1\n```\n```yaml\nb: 2\n```\n\n## Two\n```python\nc = 3\n```\n"
    assert block_in(text, "One", "python") == "a = 1\n"
    assert block_in(text, "One", "yaml") == "b: 2\n"
    assert block_in(text, "Two", "python") == "c = 3\n"
    with pytest.raises(AssertionError, match="'Two' has 0 blocks of yaml"):
        block_in(text, "Two", "yaml")


def test_a_probe_from_outside(tmp_path: Path) -> None:
    """A recipe trains on it and evaluates it; its label is in the report, and lm-eval's files are written."""
    code = block("A probe")
    assert len(code.splitlines()) <= 40
    (tmp_path / "reversal.py").write_text(code)
    table = block("A probe", 'python title="stock.py"')
    assert len(table.splitlines()) <= 40
    (tmp_path / "stock.py").write_text(table)
    recipe = {
        "name": "outside",
        "base": {"model": str(BASE)},
        "locate": {"pairs": 16, "examples": 16, "methods": ["patching", "sharpen"]},
        **yaml.safe_load(block("A probe", "yaml")),
    }
    recipe["train"] |= {"steps": 2, "control": False}
    recipe["evaluate"] |= {"pairs": [4], "examples": 4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = command("run", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "runs" / "outside" / "results.json").read_text())
    for arm in ("base", "hybrid"):
        assert results["arms"][arm]["reversal"]["5"]["n"] == 4
        assert "per_token" in results["arms"][arm]["reversal"]["3"]
    assert "reversal/5" in results["comparisons"]["hybrid"]["base"]
    report = (tmp_path / "runs" / "outside" / "report.html").read_text()
    assert "reversed copying, 5" in report and "KV-retrieval, 4 pairs" in report
    assert results["arms"]["hybrid"]["stock"]["4"]["n"] == 4 and "table look-up, 4 rows" in report
    history = json.loads((tmp_path / "runs" / "outside" / "training.json").read_text())
    assert all(entry["attention"] > 0 for entry in history), "its gold positions are trained on"

    shell = ("bash", "-c", block("A probe", "bash").replace("python", sys.executable, 1))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    group = yaml.safe_load((tmp_path / "tasks" / "surgery_retrieval.yaml").read_text())
    assert {"surgery_reversal_4_generated", "surgery_reversal_16_generated", "surgery_copying_8_generated"} <= set(
        group["task"]
    )
    assert {"surgery_stock_4", "surgery_stock_4_generated", "surgery_stock_12"} <= set(group["task"])
    row = json.loads((tmp_path / "tasks" / "stock_12.jsonl").read_text().splitlines()[0])
    wanted = row["prompt"].split()[-2]
    assert f"{wanted}:{row['choices'][row['gold']]}," in row["prompt"] and row["bounded"]
    row = json.loads((tmp_path / "tasks" / "reversal_4.jsonl").read_text().splitlines()[0])
    words = row["prompt"].split("\n")[1].split(" ")
    assert len(words) == 4 and row["answers"] == [" ".join(reversed(words))]


def test_an_objective_from_outside(tmp_path: Path) -> None:
    """A recipe gives it a weight; its curve is in training.json and in the figure."""
    code = block("An objective")
    assert len(code.splitlines()) <= 40
    (tmp_path / "smoothing.py").write_text(code)
    recipe = {
        "name": "outside",
        "base": {"model": str(BASE)},
        "locate": {"pairs": 16, "examples": 16, "methods": ["patching", "sharpen"]},
        **yaml.safe_load(block("An objective", "yaml")),
    }
    recipe["train"] |= {"steps": 3, "micro_batch": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = command("run", "recipe.yaml", "--to", "train", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "runs" / "outside"
    history = json.loads((folder / "training.json").read_text())
    uniform = math.log(json.loads((BASE / "config.json").read_text())["vocab_size"])
    for entry in history:
        assert entry["loss"] == pytest.approx(entry["answer"] + entry["label_smoothing"])
        assert entry["label_smoothing"] > 0.1 * uniform, "only a uniform prediction costs as little as log V"
    rows = list(csv.DictReader((folder / "figures" / "training" / "training.csv").read_text().splitlines()))
    assert [float(row["label_smoothing"]) for row in rows] == [entry["label_smoothing"] for entry in history]
    assert "activations" in command("run", "recipe.yaml", "--dry-run", cwd=tmp_path, path=tmp_path).stdout

    done = command("validate", "recipe.yaml", "plugins=[]", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 2 and "weights.label_smoothing" in done.stderr and "Unknown objective" in done.stderr


def test_an_installed_plugin_is_in_the_schema(tmp_path: Path) -> None:
    """An entry point of the group `surgery.plugins` is loaded without a recipe that names it."""
    (tmp_path / "reversal.py").write_text(block("A probe"))
    installed = tmp_path / "reversal-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: reversal\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[surgery.plugins]\nreversal = reversal\n")
    done = command("schema", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"reversal"' in done.stdout


# A run of seconds: one listed head, one step, one probe.
TINY = """
name: tiny
base: {model: ./base}
locate: {methods: [sharpen], pairs: 4, examples: 2, batch_size: 2}
splice: {select: list, heads: [L1H2]}
train: {steps: 1, control: false, sources: [{task: kv_retrieval, rows: 2, weights: {answer: 1.0}}]}
evaluate: {tasks: [kv_retrieval], pairs: [4], examples: 2, sentences: 2}
"""


def write_tiny(folder: Path, heading: str, module: str) -> None:
    """A pico base, the example of a section as MODULE.py, and recipe.yaml: a tiny run with the section's own keys."""
    base = pico_base(vocab_size=1024, layers=2)
    base.save_pretrained(folder / "base")
    pico_tokenizer().save_pretrained(folder / "base")
    (folder / f"{module}.py").write_text(block(heading))
    recipe = yaml.safe_load(TINY) | yaml.safe_load(block(heading, "yaml"))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def command(*words: str, cwd: Path, path: Path | None) -> subprocess.CompletedProcess[str]:
    """`surgery WORDS` in a process of its own, with `path` on its import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *([path] if path else [])]))}
    return library().run(("surgery", *words), cwd, environment)


def test_an_export_format_from_outside(tmp_path: Path) -> None:
    """A run writes it; `verify` needs the plugin on the command line, names it, and imports nothing on its own."""
    assert len(block("An export format").splitlines()) <= 40
    write_tiny(tmp_path, "An export format", "npz_format")
    done = command("run", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
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
    alone = command("verify", ".", cwd=copy, path=None)
    assert alone.returncode == 2 and "pass --plugin npz_format" in alone.stderr and not mark.exists()
    assert len(alone.stderr.splitlines()) == 1
    (copy / "npz_format.py").unlink()

    verified = command("verify", str(copy), "--plugin", "npz_format", cwd=tmp_path, path=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert f"{len(record['files'])} files" in verified.stdout and "plan.json, heads.json, README.md" in verified.stdout
    (copy / "other.npz").write_bytes(b"")
    unlisted = command("verify", str(copy), "--plugin", "npz_format", cwd=tmp_path, path=tmp_path)
    assert unlisted.returncode == 2 and unlisted.stderr.startswith("error: other.npz: not listed")
    (copy / "other.npz").unlink()
    changed = dict(np.load(copy / "weights.npz")) | {"lm_head.weight": np.zeros(3)}
    np.savez(copy / "weights.npz", **changed)
    assert "weights.npz" in command("verify", str(copy), "--plugin", "npz_format", cwd=tmp_path, path=tmp_path).stderr
    missing = command("verify", str(copy), "--plugin", "no_such_module", cwd=tmp_path, path=None)
    assert missing.returncode == 2 and "no_such_module" in missing.stderr
    again = command("run", "recipe.yaml", "export.format=nzp", cwd=tmp_path, path=tmp_path)
    assert again.returncode == 2 and "Did you mean npz?" in again.stderr


def test_a_locating_method_from_outside(tmp_path: Path) -> None:
    """Its column is in every file that locating writes, and it chooses the head."""
    code = block("A locating method")
    assert len(code.splitlines()) <= 40
    (tmp_path / "direct_logits.py").write_text(code)
    (tmp_path / "value_ablation.py").write_text(block("A locating method", 'python title="value_ablation.py"'))
    recipe = {
        "name": "outside",
        "base": {"model": str(BASE)},
        "train": {"sources": [{"task": "kv_retrieval", "rows": 4, "weights": {"answer": 1.0}}]},
        **yaml.safe_load(block("A locating method", "yaml")),
    }
    recipe["locate"] |= {"pairs": 16, "examples": 16}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = command("locate", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]

    folder = tmp_path / "runs" / "outside"
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
    assert "Dot product; colours from" in maps.with_suffix(".svg").read_text()
    page = (folder / "locate.html").read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])
    captions = {column["key"]: column["caption"] for column in data["columns"]}
    assert captions["at_value"] == "Answer margin (logits) lost with the head ablated at the value."
    (column,) = [column for column in data["columns"] if column["key"] == "direct_logits"]
    assert (column["label"], column["unit"]) == ("direct logits", "dot product")
    assert column["caption"].startswith("Dot product: what it adds at the query")
    assert data["units"]["dot product"] == {"title": "Dot product", "digits": 3}


def test_a_family_from_outside(tmp_path: Path) -> None:
    """A run on it, an export that loads without this library, and the battery with its tiny model."""
    files = {name: block("A model family", f'python title="{name}.py"') for name in ("twin_hybrid", "twin_family")}
    assert sum(bool(line.strip()) for code in files.values() for line in code.splitlines()) <= 40
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    base = pico_base(vocab_size=1024, layers=2)
    base.config.model_type = "twin"
    base.save_pretrained(tmp_path / "base")
    pico_tokenizer().save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": "twin"}))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(TINY) | {"plugins": ["twin_family"]}))
    done = command("run", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    export = tmp_path / "runs" / "tiny" / "export"
    assert (
        json.loads((export / "config.json").read_text())["auto_map"]["AutoConfig"]
        == "twin_hybrid.TwinMambaHybridConfig"
    )
    assert "from .modeling_mamba2_hybrid import" in (export / "twin_hybrid.py").read_text()
    verified = command("verify", str(export), "--plugin", "twin_family", cwd=tmp_path, path=tmp_path)
    assert verified.returncode == 0 and "in stock transformers" in verified.stdout, verified.stderr
    unknown = command("verify", str(export), cwd=tmp_path, path=None)
    assert unknown.returncode == 2 and "twin_hybrid" in unknown.stderr and "EXTENDING.md" in unknown.stderr

    tests = [f"tests/integration/test_{name}.py" for name in ("families", "family_hybrids")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    battery = ["pytest", "-q", "-p", "twin_family", "-p", "no:cacheprovider", "-k", "twin", *tests]
    done = library().run(battery, ROOT, environment, "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))")
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_attention_branch_from_outside(tmp_path: Path) -> None:
    """A run splices, trains and exports it; the export brings its file, which only a plugin or trust lets run."""
    assert len(block("An attention branch").splitlines()) <= 40
    write_tiny(tmp_path, "An attention branch", "cosine_attention")
    done = command("run", "recipe.yaml", cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    export = tmp_path / "runs" / "tiny" / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["splice"][0]["init"] == "cosine" and config["splice"][0]["temperature"] == 0.1
    assert config["auto_map"]["AutoModelForCausalLM"] == "hybrid_with_branches.Mamba2HybridForCausalLM"
    assert "from .modeling_hybrid import SplicedAttention" in (export / "cosine_attention.py").read_text()
    weights = load_file(export / "model.safetensors")
    assert weights["backbone.layers.1.mixer.attention.o_proj.weight"].any(), "it was trained"

    alone = command("verify", str(export), cwd=export.parent, path=None)
    assert alone.returncode == 2 and len(alone.stderr.splitlines()) == 1
    assert "cosine" in alone.stderr and "--plugin" in alone.stderr and "--trust-remote-code" in alone.stderr
    for words, path in ((["--plugin", "cosine_attention"], tmp_path), (["--trust-remote-code"], None)):
        verified = command("verify", str(export), *words, cwd=export.parent, path=path)
        assert verified.returncode == 0 and "in stock transformers" in verified.stdout, verified.stderr
    # With the plugin, a changed file is refused before it runs.
    mark = tmp_path / "it ran"
    copy = Path(shutil.copytree(export, tmp_path / "copy"))
    with open(copy / "cosine_attention.py", "a") as file:
        file.write(f"open({str(mark)!r}, 'w').close()\n")
    list_again(copy)
    changed = command("verify", str(copy), "--plugin", "cosine_attention", cwd=copy.parent, path=tmp_path)
    assert changed.returncode == 2 and "cosine_attention.py" in changed.stderr and not mark.exists()
