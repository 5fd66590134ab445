"""Run tasks of lm-eval on a model in memory.

lm-eval is an optional dependency, and most of its data sets are on the Hub. A task that is not available is skipped,
with the reason in the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.offsets import for_prompts
from surgery.errors import RecipeError, summary
from surgery.evaluate.lm_eval_files import tasks_folder
from surgery.recipe import LmEval

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

_NO_LIMIT = 1 << 20  # by default lm-eval cuts prompts at 2048 tokens; state-space models have no limit


def check_tasks(section: LmEval) -> None:
    """Check that lm-eval knows every task. Takes ten seconds for a task that is not of this package.

    Raises:
        RecipeError: a task is unknown. Not raised if lm-eval is not installed: then all tasks are skipped.
    """
    if find_spec("lm_eval") is None:
        return
    known = _known_tasks(of_others=False)
    if not set(section.tasks) <= set(known):
        known = _known_tasks(of_others=True)
    for task in section.tasks:
        if task not in known:
            close = " or ".join(get_close_matches(task, known, 2))
            hint = f"Did you mean {close}? " if close else ""
            hint = f"lm-eval has no task, group or tag of this name. {hint}`lm-eval ls tasks` lists its tasks."
            raise RecipeError("evaluate.lm_eval.tasks", task, hint)


@cache
def _known_tasks(of_others: bool) -> tuple[str, ...]:
    """Names of the tasks of this package, and of lm-eval's own. A sweep checks every run."""
    from lm_eval.tasks import TaskManager

    return tuple(TaskManager(include_path=str(tasks_folder()), include_defaults=of_others).all_tasks)


def run_lm_eval(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: LmEval
) -> dict[str, dict[str, Any]]:
    """Run the tasks of lm-eval that the recipe lists, on a model in eval mode.

    Returns:
        Task -> lm-eval's metrics and `n`, the number of documents; or `skipped` with the reason. A group or tag has one
        entry for each of its tasks, and one for itself if lm-eval aggregates it.
    """
    if find_spec("lm_eval") is None:
        absent = "lm-eval is not installed: pip install lm-eval"
        return {task: {"skipped": absent} for task in section.tasks}
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    length = section.max_length or getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
    given = {"backend": "causal", "batch_size": section.batch_size, "max_length": length}
    lm = HFLM(pretrained=model, tokenizer=for_prompts(tokenizer), **given)  # it would send an EOS after a prompt
    managers: dict[str, TaskManager] = {}  # by metadata: making one reads the files of all tasks
    results: dict[str, dict[str, Any]] = {}
    for task in section.tasks:
        for suffix, lengths in _lengths_of(task, section):
            if str(lengths) not in managers:
                # Some tasks truncate their texts to a number of tokens, and load the tokenizer by its name.
                metadata = {"tokenizer": tokenizer.name_or_path, **lengths}
                managers[str(lengths)] = TaskManager(include_path=str(tasks_folder()), metadata=metadata)
            manager = managers[str(lengths)]
            reason = _why_unavailable(manager, task)
            found = {task: {"skipped": reason}} if reason else _metrics(lm, manager, task, section)
            results |= {f"{name}{suffix}": metrics for name, metrics in found.items()}
    return results


def _lengths_of(task: str, section: LmEval) -> list[tuple[str, dict[str, Any]]]:
    """Metadata that sets the length of a task's prompts, once for each run of it, with a suffix for its results.

    RULER takes a list of lengths in tokens, and reports each. BABILong takes one of its own names, such as `4k`.
    """
    lengths = section.max_seq_lengths
    if lengths is None:
        return [("", {})]
    if not task.startswith("babilong"):
        return [("", {"max_seq_lengths": list(lengths)})]
    return [(f"/{name}", {"max_seq_lengths": name}) for name in (f"{length // 1024}k" for length in lengths)]


def _why_unavailable(manager: TaskManager, task: str) -> str | None:
    """Return the reason why a task cannot run; None if it can."""
    if task not in manager.all_tasks:
        return "lm-eval has no task, group or tag of this name"
    try:
        manager.load([task])
    except Exception as error:  # from the Hub, a data set, or a package that only this task needs
        return f"its data is not available: {summary(error)}"
    return None


def _metrics(lm: HFLM, manager: TaskManager, task: str, section: LmEval) -> dict[str, dict[str, Any]]:
    """Numeric results of a task, or of each task of a group."""
    from lm_eval.evaluator import simple_evaluate

    output = simple_evaluate(
        model=lm,
        tasks=[task],
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    results: Mapping[str, Mapping[str, Any]] = output["results"] | output.get("groups", {})
    counts = output["n-samples"]
    return {
        name: finite_metrics(row) | ({"n": counts[name]["effective"]} if name in counts else {})
        for name, row in results.items()
    }


def finite_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a task. Scores that are not finite, as of a model that has diverged, are listed in `skipped`."""
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    lost = [f"{key} is {value}" for key, value in numbers.items() if not math.isfinite(value) and "_stderr" not in key]
    finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
    return finite | ({"skipped": ", ".join(lost)} if lost else {})
