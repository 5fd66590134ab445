"""The error tree. Owns: the wording contract of every refusal. Must never know: torch, files, the CLI.

A user's mistake becomes one `SurgeryError`: it names the field, the value that was found and what would do.
The CLI prints it without a traceback and exits with code 2.
"""

from __future__ import annotations


class SurgeryError(ValueError):
    """A request that cannot be carried out as it was made.

    Args:
        field: what was wrong, as the user wrote it (`train.steps`, `--to`, a path).
        value: what was found there.
        hint: what would do instead.
    """

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        super().__init__(f"{field}: {value}. {hint}" if value is not None else f"{field}: {hint}")


class RecipeError(SurgeryError):
    """The recipe is not valid: unknown key, wrong type, bad value, duplicate key."""


class ModelError(SurgeryError):
    """The model folder is missing, empty, damaged, or holds a model that the toolkit has no family for."""


class PlanError(SurgeryError):
    """The heads do not fit the model: out of range, another geometry, an unspliceable site."""


class ProbeError(SurgeryError):
    """A probe cannot be made as asked: more pairs than values, choices that no token tells apart."""


class DataError(SurgeryError):
    """Documents of the user's own cannot be used; the field names the file and its line, or the row."""


class RunError(SurgeryError):
    """The run folder is in the way: it belongs to another recipe, or a stage's input is missing."""


class TrainingDiverged(SurgeryError):
    """The loss is not a number any more. The last good step is kept."""
