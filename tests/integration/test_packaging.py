"""What a release shows on PyPI: the README with absolute links, and the project's URLs."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

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


def test_a_release_has_absolute_links_and_urls(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    metadata = package_metadata(tmp_path, URL + "/")
    assert all(re.match("https://", target) for target in targets(metadata)), targets(metadata)
    assert f"{URL}/raw/v{metadata['Version']}/docs/images/pipeline.svg" in targets(metadata)
    assert f"{URL}/blob/v{metadata['Version']}/CONTRIBUTING.md" in targets(metadata)
    assert f"Source, {URL}" in metadata.get_all("Project-URL")


def test_without_the_url_the_readme_is_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    metadata = package_metadata(tmp_path, None)
    assert "CONTRIBUTING.md" in targets(metadata)
    assert metadata.get_all("Project-URL") is None
