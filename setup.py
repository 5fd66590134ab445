"""Puts the recipes that commands run by themselves into the built package; all else stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = ("finetune.yaml",)


class WithRecipes(build_py):
    """A checkout, an editable install too, finds them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "surgery", "recipes")
        folder.mkdir(parents=True, exist_ok=True)
        for name in RECIPES:
            shutil.copyfile(Path(__file__).parent / "recipes" / name, folder / name)


setup(cmdclass={"build_py": WithRecipes})
