"""Reading safely and lightly, as a user does it: the command line, the Hub's cache, a checkpoint of five gigabytes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from surgery.models import mamba_ssm_format
from surgery.models.sizes import meta_model
from tests.integration.conftest import PICO_MAMBA2 as BASE
from tests.integration.conftest import surgery
from tests.support.mamba2attn import attn_model
from tests.support.mamba_ssm_files import PADDED, tiny, write
from tests.support.processes import stock

GIB = 2**30


def write_sparse(folder: Path, layers: int) -> int:
    """A checkpoint of mamba_ssm's that is all zeros but for two tensors, in a file that is a hole; its bytes."""
    data = {"d_model": 2048, "n_layer": layers, "vocab_size": 50277, "pad_vocab_size_multiple": 16}
    config = mamba_ssm_format.convert_config({**data, "ssm_cfg": {"layer": "Mamba2"}})
    model = meta_model(config)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            begin, end = end, end + 4 * tensor.numel()
            own = name.replace("embeddings", "embedding")
            header[own] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**data, "ssm_cfg": {"layer": "Mamba2"}}))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for layer in (0, layers - 1):
            name = f"backbone.layers.{layer}.mixer.out_proj.weight"
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(torch.full(header[name]["shape"], layer + 1.0).numpy().data)
    return end


def peak_of(*arguments: str, cwd: Path) -> int:
    """Bytes that the command had resident at most. Its parent is fresh: no other child is counted."""
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'surgery', *sys.argv[1:]])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.skipif(sys.platform == "win32", reason="files with holes")
def test_five_gigabytes_are_converted_in_three(tmp_path: Path) -> None:
    size = write_sparse(tmp_path / "large", layers=48)
    assert size > 4.7 * GIB
    peak = peak_of("convert", "./large", "new", cwd=tmp_path)
    assert peak < 3 * GIB
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    for layer in (0, 47):
        name = f"backbone.layers.{layer}.mixer.out_proj.weight"
        with safe_open(tmp_path / "new" / index["weight_map"][name], "pt") as file:
            assert bool((file.get_tensor(name) == layer + 1.0).all())
    held = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.safetensors"))
    assert held < 0.5 * GIB  # or this test would fill disks


def test_convert_then_inspect_generate_and_a_stranger(tmp_path: Path) -> None:
    model = attn_model("mlp", vocab_size=PADDED)
    write(tmp_path / "own", model)
    for file in BASE.glob("tokenizer*"):
        (tmp_path / "own" / file.name).write_bytes(file.read_bytes())
    done = surgery("convert", "./own", "new", "--dtype", "float32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in 1 file" in done.stdout
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    code = (
        "import sys; sys.modules['surgery'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained('./new', trust_remote_code=True).eval()\n"
        "print(m(torch.arange(9)[None]).logits.double().sum().item())"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    alone = stock().run(["-c"], tmp_path, environment, code)
    assert alone.returncode == 0, alone.stderr
    with torch.no_grad():
        expected = model(torch.arange(9)[None]).logits.double().sum().item()
    assert float(alone.stdout.split()[-1]) == pytest.approx(expected, abs=1e-3)


def cache(folder: Path, name: str, commits: dict[str, Path]) -> None:
    """A cache of the Hub's client: `commits` are revisions and the folders whose files they hold."""
    repository = folder / f"models--{name.replace('/', '--')}"
    for number, (revision, files) in enumerate(commits.items()):
        commit = f"{number + 1:040x}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots").mkdir(exist_ok=True)
        os.symlink(files, repository / "snapshots" / commit)


_ON_THE_HUB = """
import json, sys, torch
from surgery.models.loading import load_config, load_model, revision_of
from surgery.errors import ModelError
from surgery.recipe import Base
found = {}
for name in sys.argv[1:]:
    base = Base(model=name)
    try:
        model = load_model(base)
        with torch.no_grad():
            logits = model(torch.arange(9)[None]).logits
        found[name] = [type(model).__name__, logits.double().sum().item(), revision_of(base)]
    except ModelError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_ids_of_the_hub_come_from_its_cache_when_offline(tmp_path: Path) -> None:
    first, second = tiny("Mamba2"), tiny("Mamba1")
    second.save_pretrained(tmp_path / "b")
    cache(tmp_path / "hub", "org/tiny", {"main": write(tmp_path / "a", first, "sharded bin"), "v1": tmp_path / "b"})
    names = ["org/tiny", "org/tiny@v1", "org/tiny@v2", "org/other"]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _ON_THE_HUB, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        sums = [model(torch.arange(9)[None]).logits.double().sum().item() for model in (first, second)]
    assert found["org/tiny"] == ["Mamba2ForCausalLM", pytest.approx(sums[0]), f"{1:040x}"]
    assert found["org/tiny@v1"] == ["MambaForCausalLM", pytest.approx(sums[1]), f"{2:040x}"]
    assert "org/tiny" in found["org/tiny@v2"]
    assert "org/other" in found["org/other"]
