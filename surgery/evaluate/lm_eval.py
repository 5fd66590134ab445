"""Tasks of lm-eval, on a model in memory. Owns: which ran, which could not and why, their numbers.

lm-eval is an extra, and most data sets of its tasks are on the Hub: what cannot be had is skipped, and the result says
so with the reason. Must never know: arms, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.lm_eval_tasks import FOLDER
from surgery.recipe import LmEval

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

_NO_LIMIT = 1 << 20  # lm-eval cuts prompts at 2048 tokens if a config says nothing; state-space models have no limit


def run_lm_eval(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: LmEval
) -> dict[str, dict[str, Any]]:
    """Every task's numbers under lm-eval's own names, with `n` documents; or `skipped`, the reason.

    A group or a tag gives its own line, if it has one, and one for each of its tasks.

    Args:
        model: on its device, in eval mode.
    """
    if find_spec("lm_eval") is None:
        absent = "lm-eval is not installed: pip install 'ssm-surgery[eval]'"
        return {task: {"skipped": absent} for task in section.tasks}
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    length = section.max_length or getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=section.batch_size, max_length=length)
    # Some tasks cut their texts to a length in tokens, and ask for the tokenizer by its place.
    manager = TaskManager(include_path=str(FOLDER), metadata={"tokenizer": tokenizer.name_or_path})
    found: dict[str, dict[str, Any]] = {}
    for task in section.tasks:
        reason = _missing(manager, task)
        found |= {task: {"skipped": reason}} if reason else _numbers(lm, manager, task, section)
    return found


def _missing(manager: TaskManager, task: str) -> str | None:
    """Why a task cannot be run; None if it can."""
    if task not in manager.all_tasks:
        return "lm-eval has no task, group or tag of this name"
    try:
        manager.load([task])
    except Exception as error:  # whatever the Hub, a data set, or a package that a task alone needs may raise
        text = " ".join(str(error).split())
        return f"its data cannot be had here: {type(error).__name__}: {text[:300]}"
    return None


def _numbers(lm: HFLM, manager: TaskManager, task: str, section: LmEval) -> dict[str, dict[str, Any]]:
    from lm_eval.evaluator import simple_evaluate

    given = simple_evaluate(
        model=lm,
        tasks=[task],
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    results: Mapping[str, Mapping[str, Any]] = given["results"] | given.get("groups", {})
    counts = given["n-samples"]
    found = {}
    for name, row in results.items():
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        found[name] = numbers | ({"n": counts[name]["effective"]} if name in counts else {})
    return found


__all__ = ["run_lm_eval"]
