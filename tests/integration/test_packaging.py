"""A release: what PyPI shows, what the wheel holds, and that it runs where nothing else is."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from surgery.evaluate.lm_eval_files import tasks_folder
from surgery.files.shipped import shipped_files
from surgery.recipe import load_any
from surgery.recipe.inputs import inputs_of
from tests.integration.conftest import ROOT

URL = "https://host.example/owner/name"


def package_metadata(folder: Path, url: str | None) -> Message:
    """METADATA of a wheel that is built with the repository's URL set or not."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "surgery").mkdir()
    (folder / "surgery" / "__init__.py").touch()
    (folder / "built").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "SURGERY_REPOSITORY_URL"}
    if url is not None:
        environment["SURGERY_REPOSITORY_URL"] = url
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as p; p('built')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "built").glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text(encoding="utf-8"))


def targets(metadata: Message) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", metadata.get_payload(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def test_a_release_has_absolute_links_and_without_its_url_the_readme_is_as_it_is(tmp_path: Path) -> None:
    for name in ("release", "plain"):
        (tmp_path / name).mkdir()
    metadata = package_metadata(tmp_path / "release", URL + "/")
    assert all(re.match("https://", target) for target in targets(metadata)), targets(metadata)
    assert f"{URL}/blob/v{metadata['Version']}/CONTRIBUTING.md" in targets(metadata)
    assert f"Source, {URL}" in metadata.get_all("Project-URL")
    metadata = package_metadata(tmp_path / "plain", None)
    assert "CONTRIBUTING.md" in targets(metadata) and metadata.get_all("Project-URL") is None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without a network and without files in the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    steps = ("egg_info", f"--egg-base={folder}", "build", f"--build-base={folder / 'build'}", "bdist_wheel")
    command = [sys.executable, "setup.py", "-q", *steps, f"--bdist-dir={folder / 'tree'}", f"--dist-dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_what_recipes_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        held = {name for name in files.namelist() if name.startswith("surgery/shipped/")}
        different = [
            name for name in held if files.read(name) != (ROOT / name.removeprefix("surgery/shipped/")).read_bytes()
        ]
    assert not different
    inner = {name.removeprefix("surgery/shipped/") for name in held}
    inputs = [path for recipe in (ROOT / "recipes").glob("*.yaml") for path in inputs_of(load_any(recipe)).values()]
    named = {path for path in inputs if path.startswith(("checkpoints/", "recipes/", "examples/"))}
    assert {"checkpoints/pico-far", "checkpoints/quickstart/export", "checkpoints/quickstart/heads.json"} <= named
    assert [path for path in named if not any(f"{file}/".startswith(f"{path}/") for file in inner)] == []
    tracked = [
        *(ROOT / "recipes").rglob("*.*"),
        *(ROOT / "examples").glob("*.py"),
        *(ROOT / path for path in ("checkpoints/pico-far/tokenizer.json", "checkpoints/pico-far/model.safetensors")),
    ]
    assert {path.relative_to(ROOT).as_posix() for path in tracked if path.is_file()} <= inner
    assert not [name for name in inner if "pycache" in name or name.endswith((".pyc", ".ipynb"))]
    assert wheel.stat().st_size < 8e6


def test_the_wheel_holds_the_tasks_for_lm_eval(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        tasks = {p.filename: files.read(p) for p in files.infolist() if "/lm_eval_tasks/tasks/" in p.filename}
    paths = [path for path in tasks_folder().iterdir() if path.is_file()]
    made = {f"surgery/lm_eval_tasks/tasks/{path.name}": path.read_bytes() for path in paths}
    assert tasks == made and len(tasks) > 60


def test_the_source_distribution_holds_the_same_files(tmp_path: Path) -> None:
    """A release builds its wheel from the source distribution."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    assert set(shipped_files(ROOT)) | {"setup.py", "surgery/files/shipped.py", "constraints.txt"} <= held
