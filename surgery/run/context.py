"""The state that the stages of one run share: recipe, folder, and models, each loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import encode
from surgery.data.files import local_files
from surgery.data.own_prompts import own_prompts
from surgery.data.user import count_answer_spans
from surgery.errors import RunError, reading
from surgery.files.atomic import digest, new_folder, read_json
from surgery.files.shipped import local_path
from surgery.models.loading import load_config, load_model, load_tokenizer, revision_of
from surgery.models.sizes import meta_model
from surgery.models.spliced import plan_of_hybrid
from surgery.probes.documents import Document
from surgery.probes.registry import prompts_of
from surgery.recipe import Base, Data, Recipe, as_base
from surgery.recipe.public import public_name
from surgery.report.progress_lines import ProgressLines
from surgery.run.folder import RunDir
from surgery.splice.graft import cut_model
from surgery.splice.state_size import cut_from_json
from surgery.train.optimizer import base_size
from surgery.types import HeadSet, Plan, head_set_from_json, plan_from_json

STATE = "state.json"  # the channels of the state to keep, with `splice.state_size`
PLATEAU = "plateau.json"  # the steps that the hybrid was trained, with `train.plateau`
# Keys of the models of a recipe besides the base.
SPLICE_TEACHER, TRAIN_TEACHER, CONTROL = "splice.teacher.model", "train.teacher.model", "control.model"


def part_of(reporter: ProgressLines, name: str, index: int, count: int) -> Callable[[int, int], None]:
    """Report the progress of one of `count` parts, which take as many steps each."""
    return lambda done, total: reporter.progress(index * total + done, count * total, name)


@dataclass
class Run:
    """One recipe in one folder."""

    recipe: Recipe
    folder: Path
    accelerator: Accelerator  # device and processes to run on
    reporter: ProgressLines = field(default_factory=ProgressLines)
    stages: tuple[str, ...] = ()  # names of those that this call runs
    siblings: tuple[Path, ...] = ()  # folders of other runs of a sweep, whose finished stages this run may take

    def __post_init__(self) -> None:
        self.rundir = RunDir(self.folder)
        self._base: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def share_models(self, other: Run) -> None:
        """Use the base and tokenizer that another run has loaded, if they are the same."""
        if other.recipe.base == self.recipe.base:
            self._base, self._tokenizer = other._base, other._tokenizer

    @cached_property
    def others(self) -> dict[str, Base]:
        """Models of the recipe besides the base, by their key: teachers and control."""
        recipe = self.recipe
        given = {SPLICE_TEACHER: recipe.teacher, TRAIN_TEACHER: recipe.train.teacher, CONTROL: recipe.control}
        return {key: as_base(model, key) for key, model in given.items() if model is not None}

    @cached_property
    def revision(self) -> str:
        """Hash or commit that identifies the base, its tokenizer and the teachers."""
        teachers = [model for key, model in self.others.items() if key != CONTROL]
        return "+".join(map(revision_of, [self.recipe.base, *teachers]))

    @cached_property
    def control_revision(self) -> str:
        """Hash or commit that identifies the model of `control`. Empty if there is none."""
        return revision_of(self.others[CONTROL]) if CONTROL in self.others else ""

    @cached_property
    def data_revision(self) -> str:
        """Hash of the user's local training data. The recipe itself identifies a data set on the Hub."""
        return _hash_of(self.recipe.train.own_data)

    @cached_property
    def prompts_revision(self) -> str:
        """Hash of the local files of `locate.data`. Empty if there are none."""
        return _hash_of([self.recipe.locate.data] if self.recipe.locate.data is not None else [])

    @cached_property
    def config(self) -> PreTrainedConfig:
        return load_config(self.recipe.base)

    @property
    def limits(self) -> tuple[int | None, int]:
        """Maximum number of tokens of the base, or None, and the size of its vocabulary."""
        return getattr(self.config, "max_position_embeddings", None), self.config.vocab_size

    @cached_property
    def answer_spans(self) -> dict[str, dict[str, int]]:
        """Rows of the user's data by the place of the answer, for `answer_span: auto`. See `count_answer_spans`."""
        return count_answer_spans(self.recipe.train, self.tokenizer(), *self.limits)

    @cached_property
    def base_size(self) -> int:
        """Number of weights of the base without spliced heads, from its config."""
        return base_size(meta_model(self.config, self.recipe.base.trust_remote_code))

    def base(self) -> PreTrainedModel:
        """The pretrained model, loaded once and never trained."""
        if self._base is None:
            self._base = load_model(self.recipe.base).to(self.accelerator.device)
        return self._base

    def release_base(self) -> None:
        """Free the memory of `base`. It is loaded again where it is needed."""
        self._base = None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, loaded once."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.recipe.base)
        return self._tokenizer

    def teacher(self) -> PreTrainedModel | None:
        """The teacher whose attention is transplanted, or None."""
        teacher = self.others.get(SPLICE_TEACHER)
        return None if teacher is None else load_model(teacher).to(self.accelerator.device)

    def teacher_config(self) -> PreTrainedConfig | None:
        teacher = self.others.get(SPLICE_TEACHER)
        return None if teacher is None else load_config(teacher)

    def untrained(self) -> PreTrainedModel:
        """Load the hybrid to train into main memory: the output of the stage splice, or the base if that is one."""
        spliced = Base(model=str(self.folder / "spliced"), dtype="auto")
        return load_model(spliced if self.recipe.splice is not None else self.recipe.base)

    def untrained_control(self) -> PreTrainedModel:
        """Load the model to train as the control. With `splice.state_size` its state is cut as the hybrid's is."""
        model = load_model(self.others.get(CONTROL, self.recipe.base))
        if self.recipe.state_size is None:
            return model
        path = self.folder / STATE
        with reading(str(path), None, "Run the stage splice.", RunError):
            cut = cut_from_json(read_json(path))
        return cut_model(model, cut)

    def trained_steps(self) -> dict[str, dict[str, int]]:
        """Read how many steps each stage trained the hybrid. Empty if no stage can end at a plateau."""
        if not self.recipe.train.has_plateau:
            return {}
        path = self.folder / PLATEAU
        with reading(str(path), None, "Run the stage train.", RunError):
            stages = read_json(path)
            names = [stage.name for stage in self.recipe.train.sequence]
            return {name: {**stages[name], "steps": int(stages[name]["steps"])} for name in names}

    def model(self, name: str) -> PreTrainedModel:
        """Load a model that a stage saved in the run folder."""
        return load_model(Base(model=str(self.folder / name), dtype="auto")).to(self.accelerator.device)

    def heads(self) -> HeadSet | None:
        """Read the heads of the stage locate; if the base is a hybrid, those in its folder, or None."""
        if self.recipe.splice is not None:
            return head_set_from_json(read_json(self.folder / "heads.json"))
        path = Path(local_path(self.recipe.base.model)) / "heads.json"
        return head_set_from_json(read_json(path)) if path.is_file() else None

    def plan(self) -> Plan:
        """Read the plan; if the base is a hybrid, from its config, and the teacher from its plan.json."""
        if self.recipe.splice is not None:
            return plan_from_json(read_json(self.folder / "plan.json"))
        plan = plan_of_hybrid(self.config, public_name(self.recipe.base.model))
        path = Path(local_path(self.recipe.base.model)) / "plan.json"
        return replace(plan, teacher=plan_from_json(read_json(path)).teacher) if path.is_file() else plan

    def save(self, model: PreTrainedModel, name: str) -> None:
        """Save a model atomically. It loads without remote code if `surgery.hybrid` is imported."""
        with new_folder(self.folder / name) as folder:
            model.save_pretrained(folder)


def _hash_of(data: Iterable[Data]) -> str:
    files = [file for own in data for file in local_files(own)]
    return digest(*files) if files else ""


def located_prompts(run: Run, purpose: str, count: int, pairs: int) -> list[Document]:
    """Generate evaluation prompts of the form that locating uses."""
    section = run.recipe.locate
    options = section.options(pairs, tokenizer=run.tokenizer())
    return prompts_of(section.probe, purpose, run.recipe.seed, count, options)


def own_located_prompts(run: Run) -> list[Document]:
    """Read the prompts of `locate.data`. Empty if it is not set."""
    section = run.recipe.locate
    return own_prompts(section.data, run.tokenizer(), section.examples, *run.limits) if section.data is not None else []


def sample_batch(run: Run, count: int, pairs: int = 0) -> Any:
    """Encode a few evaluation prompts of the size that locating uses, on the device."""
    documents = located_prompts(run, "sample", count, pairs)
    return encode(documents, run.tokenizer(), until_answer=True).to(run.accelerator.device)
