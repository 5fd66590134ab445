"""`surgery publish` against a small Hub, and what a stranger gets from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM

from surgery.export.verify import verify_folder
from tests.integration.conftest import ran, refused
from tests.support.hub_server import TOKEN, serve
from tests.support.processes import alone

NAME = "someone/hybrid"
IDS = [[5, 7, 9, 11, 300, 4, 8]]
FILES = "/{repo_id}/resolve/{revision}/{filename}"
# Sets what the Hub's client reads from the environment while it is imported, in a process without this library.
STRANGER = f"""
import sys, torch
from huggingface_hub import constants
address, cache, out = sys.argv[1:]
constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = address, cache, False
constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "{FILES}"
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{NAME}", trust_remote_code=True, token="{TOKEN}").eval()
AutoTokenizer.from_pretrained("{NAME}", trust_remote_code=True, token="{TOKEN}")
with torch.no_grad():
    torch.save(model(torch.tensor({IDS})).logits, out)
"""


def test_it_is_published_and_a_stranger_loads_the_same_model(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = finished / "export"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + FILES)
        done = ran("publish", str(export), NAME, cwd=tmp_path)
        commit = hub.repositories[NAME].refs["main"].oid
        assert done.stdout.splitlines()[-1] == f"{hub.url}/{NAME}/commit/{commit}"
        assert f"{NAME} is private" in done.stdout and "every sha256 matches" in done.stdout
        assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
        assert set(hub.files(NAME)) == {p.relative_to(export).as_posix() for p in export.rglob("*") if p.is_file()}

        alone(STRANGER, hub.url, str(tmp_path / "hub"), str(tmp_path / "logits.pt"), cwd=tmp_path)
        own = AutoModelForCausalLM.from_pretrained(export).eval()
        with torch.no_grad():
            expected = own(torch.tensor(IDS)).logits
        assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), expected)
        copy = snapshot_download(NAME, local_dir=tmp_path / "copy", endpoint=hub.url, token=TOKEN)
        assert verify_folder(copy)["not_checked"] == []

        changed, asked = Path(shutil.copytree(export, tmp_path / "export")), len(hub.log)
        data = bytearray((changed / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (changed / "model.safetensors").write_bytes(data)
        assert "model.safetensors: sha256 differs" in refused("publish", str(changed), NAME, cwd=tmp_path)
        assert len(hub.log) == asked, "it is refused before any request"
