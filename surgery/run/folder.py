"""The folder of one run: its recipe and one manifest for each finished stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import RunError, SurgeryError
from surgery.files.atomic import digest, leftover_of, read_json, sweep, text_or_empty, write_json, write_text
from surgery.files.ownership import check_apart, check_replaceable, kind_of, mark, remove
from surgery.recipe import Recipe, check_recipe

# Files and folders that a run writes, besides its mark (`files.ownership`).
WRITTEN = (
    "heads.json", "heads.csv", "locate.html", "locate.json", "plan.json", "spliced", "splice.json", "state.json",
    "base_text.jsonl",
    "steps", "adapters", "teacher_logits", "logs", "trained", "training.json", "plateau.json", "no_splice",
    "no_splice_training.json", "results.json", "report.html", "figures", "export", ".stages", "recipe.yaml", "run.log",
)  # fmt: skip
_UNSET = "not set"


class RunDir:
    """The folder of one run, `runs/NAME/`, with `recipe.yaml` and manifests of its stages under `.stages/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> bool:
        """Check that this recipe may use the folder. Changes nothing.

        Args:
            recipe_yaml: the recipe in full.
            overwrite: allow the removal of a run of another recipe. Returns True if there is one.
            inputs: local files and folders that the recipe reads, by field; its own file under `recipe`.

        Raises:
            RunError: the folder holds other files, an input of the run, or without `overwrite` another recipe's run.
        """
        instead, inputs = f"Set another name, such as name={self.path.name}-2.", inputs or {}
        stored = text_or_empty(self.path / "recipe.yaml")
        differs = _difference(stored, recipe_yaml) if stored else ""
        if stored and kind_of(self.path) in (None, "run") and not differs:
            models = {field: given for field, given in inputs.items() if field != "recipe"}
            check_apart("run folder", [self.path / name for name in WRITTEN], models, instead)
            return False
        # A process that was killed in `claim` leaves only its half-written recipe.
        if self.path.is_dir() and all(leftover_of(p) == "recipe.yaml" for p in self.path.iterdir()):
            return False
        if not check_replaceable("run folder", self.path, "run", inputs, instead):
            return False
        if not overwrite:
            hint = f"The folder belongs to another recipe{differs}. {instead} Or pass --overwrite to remove that run."
            raise RunError("run folder", str(self.path), hint)
        return True

    def claim(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> None:
        """Use the folder for this recipe, if `check` allows it. `overwrite` removes a run of another recipe."""
        if self.check(recipe_yaml, overwrite, inputs):
            remove(self.path, WRITTEN)
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        for folder in [p for p in self.path.iterdir() if p.is_dir() and not p.is_symlink()]:
            sweep(folder)
        write_text(self.path / "recipe.yaml", recipe_yaml)
        mark(self.path, "run")

    def changes(self, recipe: Recipe) -> list[str]:
        """List what differs from the recipe of the last run here, as `key: then -> now`. Empty before the first run."""
        try:
            stored = yaml.safe_load(text_or_empty(self.path / "recipe.yaml"))
            earlier = check_recipe(stored) if stored else recipe
        except (yaml.YAMLError, SurgeryError, AttributeError):
            return []
        then, now = (
            {key: json.dumps(value, ensure_ascii=False) for key, value in _values(recipe.model_dump(mode="json"))}
            for recipe in (earlier, recipe)
        )
        return [f"{key}: {then.get(key, _UNSET)} -> {now.get(key, _UNSET)}" for key in _differing(now, then)]

    def manifest(self, stage: str) -> Mapping[str, Any] | None:
        """Read the manifest of a stage: `key`, `outputs` (hash) and `seconds`. None if the stage is not finished."""
        path = self.path / ".stages" / f"{stage}.json"
        manifest = read_json(path) if path.is_file() else None
        if manifest is not None and not (isinstance(manifest, dict) and {"key", "outputs"} <= manifest.keys()):
            raise RunError(str(path), "not the manifest of a stage", "Delete the file. The stage runs again.")
        return manifest

    def is_fresh(self, stage: str, key: str, outputs: Sequence[str]) -> bool:
        """True if the stage finished with this key and its outputs, names in this folder, are unchanged."""
        manifest = self.manifest(stage) if self.is_finished(stage, key, outputs) else None
        return manifest is not None and manifest["outputs"] == digest(*(self.path / name for name in outputs))

    def is_finished(self, stage: str, key: str, outputs: Sequence[str]) -> bool:
        """True if the stage finished with this key and its outputs exist, even if they were edited."""
        manifest = self.manifest(stage)
        return manifest is not None and manifest["key"] == key and all((self.path / name).exists() for name in outputs)

    def finish(self, stage: str, key: str, outputs: Sequence[str], seconds: float, origin: str = "") -> None:
        """Write the manifest of a stage, which makes it fresh. `origin` says from which run it was taken, if any."""
        hashed = digest(*(self.path / name for name in outputs))
        data = {"key": key, "outputs": hashed, "seconds": round(seconds, 2), **({"origin": origin} if origin else {})}
        write_json(self.path / ".stages" / f"{stage}.json", data)

    def forget(self, stage: str) -> None:
        """Remove the manifest of a stage, so that the stage runs again."""
        (self.path / ".stages" / f"{stage}.json").unlink(missing_ok=True)


def _difference(stored: str, recipe_yaml: str) -> str:
    """Return what tells two runs apart, as ` (key: stored value)`. Empty if both are the same run."""
    ours, theirs = _identity(recipe_yaml), _identity(stored)
    if not theirs:
        return " (its recipe.yaml cannot be read)"
    differing = [f"{key}: {theirs.get(key)}" for key in _differing(ours, theirs)]
    return f" ({', '.join(differing)})" if differing else ""


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


def _values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a recipe with their dotted keys. A list without sections is one value."""
    parts = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    if parts and (isinstance(node, dict) or any(isinstance(part, dict) for _, part in parts)):
        for name, part in parts:
            yield from _values(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _identity(recipe_yaml: str) -> dict[str, Any]:
    """Values that identify a run: name, seed and base. Changes of other sections rerun their stages.

    With `splice: null` no stage is left if the user's data changes, so its paths identify the run too.
    """
    try:
        recipe = yaml.safe_load(recipe_yaml)
    except yaml.YAMLError:
        recipe = None
    if not isinstance(recipe, dict):
        return {}
    values = dict(_values(recipe))
    identity = {key: value for key, value in values.items() if key.partition(".")[0] in ("name", "seed", "base")}
    if recipe.get("splice") is None:
        paths = [value for key, value in values.items() if key.startswith("train.") and key.endswith(".data.path")]
        identity["data"] = ", ".join(map(str, paths))
    return identity
