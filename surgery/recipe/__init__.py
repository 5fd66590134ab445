"""The schema of a recipe: what each section may contain, its defaults, and how a recipe is read. Imports no torch."""

from surgery.recipe.analysis import AnalysisRecipe, Change, Swap, Sweep
from surgery.recipe.base import Base, Checkpoint, Teacher, as_base
from surgery.recipe.evaluate import Efficiency, Evaluate, EvaluationTask, LmEval
from surgery.recipe.export import Export, Hardware
from surgery.recipe.loading import check_recipe, find_recipe, load_any, load_recipe, shipped, to_yaml
from surgery.recipe.locate import Locate
from surgery.recipe.optimizer import Optimizer
from surgery.recipe.pretrain import PretrainRecipe, TinyMamba2, TinyTransformer
from surgery.recipe.run import Recipe
from surgery.recipe.sources import Columns, Data, Source, Task, Weights
from surgery.recipe.splice import Splice
from surgery.recipe.stage_parts import Align, Distil, Lora, Plateau
from surgery.recipe.train import Train, TrainStage

__all__ = [
    "Align", "AnalysisRecipe", "Base", "Change", "Checkpoint", "Columns", "Data", "Distil", "Efficiency",
    "Evaluate", "EvaluationTask", "Export", "Hardware", "LmEval", "Locate", "Lora", "Optimizer", "Plateau",
    "PretrainRecipe", "Recipe", "Source", "Splice", "Swap", "Sweep", "Task", "Teacher",
    "TinyMamba2", "TinyTransformer", "Train", "TrainStage", "Weights", "as_base", "check_recipe",
    "find_recipe", "load_any", "load_recipe", "shipped", "to_yaml",
]  # fmt: skip
