"""Registry of the pretrained models of the study. To add one, add an entry to `BASES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import ENGLISH, FAR, FAR_AGAIN, MAMBA1, ROOT, SHIPPED
from bench.studies.head_choice import mamba1
from surgery.recipe import PretrainRecipe, load_recipe
from surgery.run.pretrain import pretrain

RECIPES = Path(__file__).parent / "recipes"
DISTANT: Mapping[str, Any] = {"filler": (0, 20), "locate_pairs": 12, "rows": 8, "examples": 400}


@dataclass(frozen=True)
class StudyBase:
    """A pretrained model, and what its arms train on and answer.

    Attributes:
        label: heading in the report.
        folder: checkpoint.
        make: writes the checkpoint into a folder. None if it cannot be made here: a missing folder then skips the base.
        options: fields of `arms.Budget` that differ: the task of training and evaluation with its pairs and filler,
            the pairs of locating, and the kinds of text that are kept. Choose `locate_pairs` so that the base scores
            0.6 to 0.95.
    """

    label: str
    folder: Path
    make: Callable[[Path], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        """Whether the checkpoint exists or can be made."""
        return self.folder.is_dir() or self.make is not None


def by_recipe(recipe: Path, *overrides: str) -> Callable[[Path], None]:
    """Return a function that makes a checkpoint by a recipe of `surgery pretrain`, with overrides such as `seed=1`."""
    return lambda folder: pretrain(load_recipe(recipe, overrides, PretrainRecipe), folder)


BASES: Mapping[str, StudyBase] = {
    "shipped": StudyBase("`pico-mamba2`, adjacent pairs", SHIPPED, options={"locate_pairs": 24}),
    "far": StudyBase("the base with distant keys and values", FAR, options=DISTANT),
    "again": StudyBase(
        "the base with distant keys and values, pretrained with seed 1",
        FAR_AGAIN,
        by_recipe(ROOT / "recipes" / "pretrain-pico-far.yaml", "seed=1"),
        options=DISTANT,
    ),
    "english": StudyBase("English text", ENGLISH, by_recipe(RECIPES / "english.yaml"), options={"locate_pairs": 8}),
    "mamba1": StudyBase("a Mamba-1 with distant keys and values", MAMBA1, mamba1.make, options=DISTANT),
}
