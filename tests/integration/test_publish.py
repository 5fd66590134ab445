"""`surgery publish` in a process of its own, against a small Hub; and what a stranger gets from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM

import surgery.hybrid  # noqa: F401 - registers the classes
from surgery.export.verify import verify_folder
from tests.support.hub_server import TOKEN, HubServer, serve

NAME = "someone/hybrid"
IDS = [[5, 7, 9, 11, 300, 4, 8]]


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with serve() as server:
        yield server


def logged_in(hub: HubServer, home: Path) -> dict[str, str]:
    """The environment of somebody with a fresh machine and a token."""
    given = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return {**{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}, **given}


def command(hub: HubServer, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "surgery", "publish", str(folder), NAME]
    return subprocess.run(asked, cwd=home, env=logged_in(hub, home), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def done(hub: HubServer, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return command(hub, finished / "export", tmp_path_factory.mktemp("publish"))


def test_the_command_says_what_it_did_and_never_the_token(
    done: subprocess.CompletedProcess[str], hub: HubServer, finished: Path
) -> None:
    assert done.returncode == 0, done.stderr
    commit = hub.repositories[NAME].refs["main"].oid
    assert done.stdout.splitlines()[-1] == f"{hub.url}/{NAME}/commit/{commit}"
    assert f"{NAME} is private" in done.stdout and "every sha256 matches" in done.stdout
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
    sent = {p.relative_to(finished / "export").as_posix() for p in (finished / "export").rglob("*") if p.is_file()}
    assert set(hub.files(NAME)) == sent


def test_a_stranger_loads_the_same_model_from_there(
    done: subprocess.CompletedProcess[str], hub: HubServer, finished: Path, tmp_path: Path
) -> None:
    assert done.returncode == 0, done.stderr
    script = f"""
import sys, torch
sys.modules["surgery"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{NAME}", trust_remote_code=True).eval()
AutoTokenizer.from_pretrained("{NAME}", trust_remote_code=True)
with torch.no_grad():
    torch.save(model(torch.tensor({IDS})).logits, sys.argv[1])
"""
    asked = [sys.executable, "-c", script, str(tmp_path / "logits.pt")]
    loaded = subprocess.run(asked, cwd=tmp_path, env=logged_in(hub, tmp_path), capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    own = AutoModelForCausalLM.from_pretrained(finished / "export").eval()
    with torch.no_grad():
        expected = own(torch.tensor(IDS)).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), expected)


def test_a_downloaded_copy_verifies(
    done: subprocess.CompletedProcess[str], hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    copy = snapshot_download(NAME, local_dir=tmp_path / "copy", endpoint=hub.url, token=TOKEN)
    assert verify_folder(copy)["not_checked"] == []


def test_a_changed_folder_is_refused_before_any_request(hub: HubServer, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "export", tmp_path / "export"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    before = len(hub.log)
    refused = command(hub, folder, tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("error: model.safetensors: sha256 differs")
    assert len(refused.stderr.splitlines()) == 1 and len(hub.log) == before
