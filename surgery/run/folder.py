"""The folder of one run: its recipe and one manifest per finished stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.errors import RunError
from surgery.files.atomic import digest, read_json, sweep, text_or_empty, write_json, write_text
from surgery.files.ownership import check_apart, check_replaceable, kind_of, mark, remove

# What a run writes into its folder, besides its mark.
WRITTEN = (
    "heads.json", "heads.csv", "locate.html", "locate.json", "plan.json", "spliced",
    "splice.json", "steps", "teacher_logits", "logs", "trained", "training.json", "no_splice",
    "no_splice_training.json", "results.json", "report.html", "figures", "export", ".stages", "recipe.yaml",
)  # fmt: skip


class RunDir:
    """The folder of one run: `runs/NAME/`, with `recipe.yaml` and one manifest a stage under `.stages/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> bool:
        """Whether taking the folder for this recipe removes a run of another one. Changes nothing.

        Args:
            inputs: what the recipe reads from this disk, and its own file as `recipe`.

        Raises:
            RunError: the folder holds something else, or what the run reads; or a run of another recipe, and
                `overwrite` is not set.
        """
        instead, inputs = f"Set another name, such as name={self.path.name}-2.", inputs or {}
        stored = text_or_empty(self.path / "recipe.yaml")
        if stored and kind_of(self.path) in (None, "run") and _base_of(stored) == _base_of(recipe_yaml):
            models = {field: given for field, given in inputs.items() if field != "recipe"}
            check_apart("run folder", [self.path / name for name in WRITTEN], models, instead)
            return False
        # A claim that was killed leaves nothing but its half-written recipe.
        if self.path.is_dir() and all(p.match(".recipe.yaml.*.tmp") for p in self.path.iterdir()):
            return False
        if not check_replaceable("run folder", self.path, "run", inputs, instead):
            return False
        if not overwrite:
            hint = f"It belongs to another recipe or run. {instead} --overwrite removes that run."
            raise RunError("run folder", str(self.path), hint)
        return True

    def claim(self, recipe_yaml: str, overwrite: bool = False, inputs: Mapping[str, str] | None = None) -> None:
        """Takes the folder for this recipe. With `overwrite` a run of another one is removed.

        Raises:
            RunError: as `check`.
        """
        if self.check(recipe_yaml, overwrite, inputs):
            remove(self.path, WRITTEN)
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path)
        for folder in [p for p in self.path.iterdir() if p.is_dir()]:
            sweep(folder)
        write_text(self.path / "recipe.yaml", recipe_yaml)
        mark(self.path, "run")

    def manifest(self, stage: str) -> Mapping[str, Any] | None:
        """What the stage wrote last, or None. Raises RunError where the file holds something else."""
        path = self.path / ".stages" / f"{stage}.json"
        found = read_json(path) if path.is_file() else None
        if found is not None and not (isinstance(found, dict) and {"key", "outputs"} <= found.keys()):
            raise RunError(str(path), "no manifest of a stage", "Delete it: the stage runs again.")
        return found

    def is_fresh(self, stage: str, key: str, outputs: Sequence[Path]) -> bool:
        """True when the stage finished with this key and its outputs are as it left them."""
        manifest = self.manifest(stage)
        return (
            self.is_finished(stage, key, outputs) and manifest is not None and manifest["outputs"] == digest(*outputs)
        )

    def is_finished(self, stage: str, key: str, outputs: Sequence[Path]) -> bool:
        """True when the stage finished with this key and its outputs are there; they may have been edited since."""
        manifest = self.manifest(stage)
        return manifest is not None and manifest["key"] == key and all(p.exists() for p in outputs)

    def finish(self, stage: str, key: str, outputs: Sequence[Path], seconds: float) -> None:
        """Writes the stage's manifest: from now on it is fresh."""
        data = {"key": key, "outputs": digest(*outputs), "seconds": round(seconds, 2)}
        write_json(self.path / ".stages" / f"{stage}.json", data)

    def forget(self, stage: str) -> None:
        """The stage will run again."""
        (self.path / ".stages" / f"{stage}.json").unlink(missing_ok=True)


def _base_of(recipe_yaml: str) -> str:
    """The lines that make two recipes the same operation: name, seed and base; sections may change and rerun."""
    lines = recipe_yaml.splitlines()
    head = lines[: next((i for i, line in enumerate(lines) if line.startswith("locate:")), len(lines))]
    return "\n".join(head)
