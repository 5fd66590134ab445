"""One stage of a run: what it depends on, reads, checks, does and writes. `run.pipeline` orders the stages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.files.atomic import digest, fingerprint
from surgery.models.loading import check_finite
from surgery.recipe import Recipe
from surgery.run.context import Run

# Fields of the recipe that make the prompts of locating, for the stages that generate such prompts again.
PROMPTS = tuple(f"locate.{key}" for key in ("task", "pairs", "filler", "value_digits", "data", "generated"))
_OF_SPLICING = ("heads.json", "plan.json", "spliced")  # not written with `splice: null`


class Stage:
    """One stage. A subclass sets the attributes and overrides what differs."""

    name: str  # of its command
    what: str  # for the progress line
    sections: tuple[str, ...]  # sections of the recipe, or their fields, that the result depends on
    reads: tuple[str, ...] = ()  # files and folders of the run folder
    writes: tuple[str, ...] = ()  # files and folders of the run folder
    extras: tuple[str, ...] = ()  # what it writes for some recipes, and no later stage reads
    loads: tuple[str, ...] = ()  # keys of its models besides the base
    together = False  # whether every process takes part, or rank 0 alone
    version = 1  # increased when the result changes for the same inputs
    is_shared = True  # whether runs of a sweep may take its outputs from each other: they do not name their run

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Files and folders of the run folder that it reads for this recipe."""
        return tuple(name for name in self.reads if recipe.splice is not None or name not in _OF_SPLICING)

    def outputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Files and folders of the run folder that it writes for this recipe. Empty if it has nothing to do."""
        return self.writes

    def check_configs(self, run: Run) -> None:
        """Check the configs of its models. Loads no weights and no data."""

    def check_machine(self, run: Run) -> None:
        """Check the weights of its models besides the base, and the packages of this machine."""
        for key in run.others.keys() & set(self.loads):
            check_finite(run.others[key])

    def check_tokenizers(self, run: Run) -> None:
        """Check the tokenizers of its models."""

    def check_data(self, run: Run) -> None:
        """Check the user's data and prompts. Loads no weights."""

    def work(self, run: Run, key: str) -> float | None:
        """Run the stage. Returns the seconds of earlier sessions that it resumed from, None if it never resumes."""
        raise NotImplementedError

    def depends_on(self, settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the result depends on besides `sections` and `reads`, by name. `values` are `settings` as plain data."""
        return {}

    def key(self, run: Run, settings: Recipe | None = None, inputs: Mapping[str, str] | None = None) -> str:
        """Hash everything that the result depends on: sections of the recipe, inputs and revisions.

        Args:
            run: the run.
            settings: other settings for the same base, teachers and data. By default the recipe of the run.
            inputs: hash by name of what earlier stages write. By default of the files in the run folder.
        """
        settings = settings or run.recipe
        values = settings.model_dump(mode="json")
        for unused in ("save_every", "workers", "trackers", "check_every"):
            del values["train"][unused]
        values["train"]["control"] = settings.has_control and "control" in self.sections
        parts: dict[str, Any] = {}
        for part in ("seed", *self.sections):
            if part == "control" and settings.splice is not None:
                continue  # the control is the base
            section, _, name = part.partition(".")
            parts[part] = values[section][name] if name else values[section]
        if "control" in parts:
            parts["control revision"] = run.control_revision
        if "train" in parts and run.data_revision:
            parts["data revision"] = run.data_revision
        if settings.plugins:
            parts["plugins"] = {name: _plugin_revision(name) for name in settings.plugins}
        parts |= self.depends_on(settings, values)
        if {"locate", "locate.pairs", "state"} & parts.keys() and run.prompts_revision:
            parts["prompts revision"] = run.prompts_revision
        names = self.inputs(settings)
        hashes = {name: digest(run.folder / name) if inputs is None else inputs.get(name, "") for name in names}
        return fingerprint([self.name, self.version, run.revision, parts, hashes])


def _plugin_revision(module: str) -> str:
    """Hash of the code of a plugin, which is imported already: its file, or its package. Empty if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return ""
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return digest(*files)
