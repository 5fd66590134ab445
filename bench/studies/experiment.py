"""Base class of studies whose arms are trained one by one and kept in a folder, one file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from bench.common import finished, load
from bench.studies.site_selection.arms import Arm, Budget
from surgery.files.atomic import new_folder, write_json
from surgery.models.loading import revision_of
from surgery.recipe import Base, PretrainRecipe, Train, load_recipe
from surgery.run.pretrain import pretrain
from surgery.train.training import train_model

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, str]  # with the revision of the weights
SEEDS = (0, 1, 2)


@dataclass
class ArmExperiment(ABC):
    """A folder of results, and the budget, seeds and bases of its arms.

    The result of an arm is `FOLDER/arms/FILE`, with a hash of the arm's definition as its `key`. An arm whose file is
    missing, or has another key, runs again.
    """

    folder: Path
    budget: Budget = field(default_factory=Budget)
    seeds: tuple[int, ...] = SEEDS
    _loaded: dict[str, Loaded] = field(default_factory=dict, init=False, repr=False)

    @abstractmethod
    def checkpoint(self, base: str) -> Path:
        """Folder of a base. Pretrain it first if it does not exist."""

    @abstractmethod
    def arms(self, only: str | None = None) -> Iterator[Arm]:
        """All arms, or those of one base, the most important first."""

    @abstractmethod
    def run_arm(self, arm: Arm) -> dict[str, Any]:
        """Train an arm and evaluate it. Returns plain data."""

    @abstractmethod
    def describe(self, arm: Arm, outcome: dict[str, Any]) -> str:
        """The line to print for a finished arm."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders with results. The first one has precedence, and is the only one that is written."""
        return (self.folder,)

    def budget_of(self, base: str) -> Budget:
        """The budget of the arms of a base."""
        return self.budget

    def model(self, base: str) -> Loaded:
        """The pretrained model, its tokenizer, and its revision. Pretrain it first if it does not exist."""
        if base not in self._loaded:
            folder = self.checkpoint(base)
            model, tokenizer = load(folder)
            self._loaded[base] = (in_short_chunks(model), tokenizer, revision_of(Base(model=str(folder))))
        return self._loaded[base]

    def find(self, part: str, name: str, key: str) -> dict[str, Any] | None:
        """The first result with this key in a file `name` of `folders`; None if there is none.

        Args:
            part: `arms` or `choices`.
        """
        results = (finished(folder / part / name, key) for folder in self.folders)
        return next((result for result in results if result is not None), None)

    def files(self, part: str) -> Iterator[Path]:
        """Files of all results, those of the first folder first."""
        for folder in self.folders:
            yield from sorted((folder / part).glob("*.json"))

    def key(self, arm: Arm) -> str:
        """Hash of everything that the result of an arm depends on."""
        return arm.identity(self.budget_of(arm.base), self.model(arm.base)[2])

    def result(self, arm: Arm) -> dict[str, Any] | None:
        """The finished result of an arm, if there is one."""
        return self.find("arms", arm.file, self.key(arm))

    def run(self, most: int | None = None, only: str | None = None) -> int:
        """Run the arms that have no result, at most `most`, of the base `only`. Returns the number of arms run."""
        ran = 0
        for arm in self.arms(only):
            if ran == most:
                break
            if self.result(arm) is not None:
                continue
            outcome = self.run_arm(arm)
            write_json(self.folder / "arms" / arm.file, {"key": self.key(arm), **outcome})
            ran += 1
            print(self.describe(arm, outcome), flush=True)
        return ran


def pretrained(folder: Path, label: str, recipe: Path, overrides: tuple[str, ...] = ()) -> Path:
    """Return the folder of a base. Pretrain it with the recipe first if it does not exist."""
    if not folder.exists():
        print(f"pretraining {label}", flush=True)
        pretrain(load_recipe(recipe, overrides, PretrainRecipe), folder)
    return folder


def in_short_chunks(model: PreTrainedModel) -> PreTrainedModel:
    """Set a shorter chunk. It changes the results by rounding only, and the scan is a fifth faster without kernels."""
    for mixer in [m for m in model.modules() if isinstance(m, Mamba2Mixer)]:
        mixer.chunk_size = 16
    return model


def train_and_save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, train: Train, teacher: PreTrainedModel, folder: Path
) -> None:
    """Train a converted model, with KL terms to the one that it was converted from, and write the checkpoint."""

    def show(step: int, history: list[dict[str, float]]) -> None:
        if step % 10 == 0:
            print(f"step {step} of {train.steps}: loss {history[-1]['loss']:.3f}", flush=True)

    train_model(model, tokenizer, train, base=teacher, on_step=show)
    with new_folder(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
