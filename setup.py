"""Build steps that pyproject.toml cannot express: shipped files inside the package, and links for PyPI.

SURGERY_REPOSITORY_URL, such as https://HOST/OWNER/NAME, makes the README's relative links absolute and adds the
project's URLs. The release workflow sets it. Without it the README stays as it is, and the package has no URLs.
"""

import os
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
URL = "SURGERY_REPOSITORY_URL"


class WithShippedFiles(build_py):
    """Adds the files of surgery/files/shipped.py and the tasks for lm-eval. An editable install uses the checkout's."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shipped = runpy.run_path(str(ROOT / "surgery" / "files" / "shipped.py"))
        folder = Path(self.build_lib, "surgery", shipped["FOLDER"])
        shutil.rmtree(folder, ignore_errors=True)
        for name in shipped["shipped_files"](ROOT):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
        sys.path.insert(0, str(Path(self.build_lib).resolve()))
        sys.dont_write_bytecode = True  # it would be in the wheel
        from surgery.evaluate.lm_eval_files import tasks_folder

        tasks_folder()


def project_version() -> str:
    """The version in pyproject.toml."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def with_absolute_links(text: str, url: str, tag: str) -> str:
    """Make the relative links and images of a Markdown file in the root absolute.

    Args:
        text: the file.
        url: the repository, such as `https://HOST/OWNER/NAME`.
        tag: the tag that links point at.
    """

    def absolute(match: re.Match) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['label']}]({url}/{kind}/{tag}/{match['path']})"

    return re.sub(r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?!#|[a-z]+:)(?P<path>[^)\s]+)\)", absolute, text)


def metadata() -> dict:
    """The long description and the project's URLs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    url = os.environ.get(URL, "").rstrip("/")
    if not url:
        return {"long_description": readme, "long_description_content_type": "text/markdown"}
    tag = f"v{project_version()}"
    return {
        "long_description": with_absolute_links(readme, url, tag),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            "Source": url,
            "Documentation": f"{url}/blob/{tag}/docs/quickstart.md",
            "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{url}/issues",
        },
    }


if __name__ == "__main__":
    setup(cmdclass={"build_py": WithShippedFiles}, **metadata())
