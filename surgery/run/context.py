"""What the stages of one run share: its recipe, its folder, and what has been loaded. Owns: loading each of them once.

Must never know: what a stage does, when it runs, how progress is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.files import local_files
from surgery.files.atomic import digest, new_folder, read_json
from surgery.models.loading import load_config, load_model, load_tokenizer, revision_of
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Base, Recipe, as_base
from surgery.recipe.public import public_name
from surgery.run.folder import RunDir
from surgery.types import HeadSet, Plan, head_set_from_json, plan_from_json


class Reporter(Protocol):
    """Where progress goes; the CLI draws it."""

    def start(self, stage: str, what: str) -> None: ...

    def progress(self, done: int, total: int, note: str = "") -> None: ...

    def finish(self, stage: str, seconds: float) -> None: ...

    def skip(self, stage: str, why: str) -> None: ...


class Silent:
    """No progress: for the Python API and for ranks other than 0."""

    def start(self, stage: str, what: str) -> None:
        """Ignores it."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Ignores it."""

    def finish(self, stage: str, seconds: float) -> None:
        """Ignores it."""

    def skip(self, stage: str, why: str) -> None:
        """Ignores it."""


@dataclass
class Run:
    """One recipe in one folder; `stages` are those that this call goes through."""

    recipe: Recipe
    folder: Path
    accelerator: Accelerator
    reporter: Reporter = field(default_factory=Silent)
    stages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.rundir = RunDir(self.folder)
        self._base: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def revision(self) -> str:
        """What identifies the base, its tokenizer and the teachers; their files are hashed once."""
        teachers = [teacher for teacher in (self.recipe.teacher, self.recipe.train.teacher) if teacher is not None]
        return "+".join([revision_of(self.recipe.base), *(revision_of(as_base(teacher)) for teacher in teachers)])

    @cached_property
    def control_revision(self) -> str:
        """What identifies the model that `control` names; nothing where none is."""
        return revision_of(as_base(self.recipe.control)) if self.recipe.control is not None else ""

    @cached_property
    def data_revision(self) -> str:
        """What identifies the user's own data: a hash of local files; a Hub set by what the recipe says."""
        files = [file for data in self.recipe.train.own_data for file in local_files(data)]
        return digest(*files) if files else ""

    def base(self) -> PreTrainedModel:
        """The pretrained model, loaded once; never trained."""
        if self._base is None:
            self._base = load_model(self.recipe.base).to(self.accelerator.device)
        return self._base

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, loaded once."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.recipe.base)
        return self._tokenizer

    def teacher(self) -> PreTrainedModel | None:
        """Whose attention is transplanted, if any."""
        teacher = self.recipe.teacher
        return load_model(as_base(teacher)).to(self.accelerator.device) if teacher else None

    def teacher_config(self) -> PreTrainedConfig | None:
        """Its config alone."""
        teacher = self.recipe.teacher
        return load_config(as_base(teacher)) if teacher else None

    def untrained(self) -> PreTrainedModel:
        """The hybrid that training begins with, to be changed: what `splice` wrote, or a copy of a base that is one."""
        return self.model("spliced") if self.recipe.splice is not None else load_model(self.recipe.base)

    def untrained_control(self) -> PreTrainedModel:
        """The model that the control's training begins with, to be changed."""
        return load_model(as_base(self.recipe.control) if self.recipe.control is not None else self.recipe.base)

    def model(self, name: str) -> PreTrainedModel:
        """A model that a stage has saved in the run folder."""
        return load_model(Base(model=str(self.folder / name), dtype="auto")).to(self.accelerator.device)

    def heads(self) -> HeadSet | None:
        """What `locate` wrote; of a base that is a hybrid, what lies in its folder, if anything does."""
        own = self.recipe.splice is None
        path = (Path(self.recipe.base.model) if own else self.folder) / "heads.json"
        return None if own and not path.is_file() else head_set_from_json(read_json(path))

    def plan(self) -> Plan:
        """What `plan` wrote; of a base that is a hybrid, what its config says."""
        if self.recipe.splice is None:
            return plan_of_hybrid(load_config(self.recipe.base), public_name(self.recipe.base.model))
        return plan_from_json(read_json(self.folder / "plan.json"))

    def save(self, model: PreTrainedModel, name: str) -> None:
        """Writes a model folder whole; loads without remote code where `surgery.hybrid` is imported."""
        with new_folder(self.folder / name) as folder:
            model.save_pretrained(folder)
