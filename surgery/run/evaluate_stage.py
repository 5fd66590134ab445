"""The stage evaluate: measure every arm, and write the results and the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import __version__ as accelerate_version
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from surgery import __version__
from surgery.data.generation import exact_answers
from surgery.data.offsets import encode_alike
from surgery.evaluate.efficiency import efficiency
from surgery.evaluate.evaluation import Arm, compare_arms, evaluate_model, held_out_documents, mark_seen, side_by_side
from surgery.evaluate.lm_eval import check_tasks
from surgery.evaluate.prompts import READ_TWICE, PromptSet, make_prompts, prompts_twice
from surgery.files.atomic import new_folder, read_json, write_json
from surgery.models.alterations import HEADS_OFF, heads_off
from surgery.models.loading import has_tokenizer, load_model, load_tokenizer
from surgery.models.sizes import sizes_of
from surgery.probes.documents import answer_list
from surgery.probes.registry import PROBES
from surgery.report.results import LONGEST_EXAMPLE, arm_label, ordered_arms, trained_pairs
from surgery.report.run_report import write_report
from surgery.run.context import SPLICE_TEACHER, TRAIN_TEACHER, Run, part_of, sample_batch
from surgery.run.stage import PROMPTS, Stage

_LINKED = ("locate.html", "heads.csv", "plan.json", "results.json", "recipe.yaml")  # files that the report links


class EvaluateStage(Stage):
    name, what = "evaluate", "evaluating every arm"
    sections = ("base", "control", "train", *PROMPTS, "evaluate")
    reads = ("trained", "no_splice", "spliced", "plan.json", "heads.json")
    writes = ("results.json", "report.html", "figures/evaluate")
    version, is_shared = 2, False

    def check_data(self, run: Run) -> None:
        """Generate one prompt of each kind, and look up the tasks of lm-eval."""
        section = run.recipe.evaluate
        tasks = tuple(task.model_copy(update={"examples": None}) for task in section.tasks)
        few = section.model_copy(update={"tasks": tasks, "examples": 1, "sentences": 1})
        make_prompts(few, run.recipe.seed, tokenizer=run.tokenizer())
        if section.lm_eval is not None:
            check_tasks(section.lm_eval)

    def work(self, run: Run, key: str) -> None:
        began = time.perf_counter()
        recipe = run.recipe
        held_out = held_out_documents(recipe.train, run.tokenizer(), recipe.evaluate.examples, *run.limits)
        prompts = make_prompts(recipe.evaluate, recipe.seed, held_out, run.tokenizer())
        models: dict[str, Callable[[], PreTrainedModel]] = {"base": run.base}
        if recipe.has_control:
            models["no_splice"] = lambda: run.model("no_splice")
        twice = prompts_twice(prompts, run.tokenizer().bos_token) if recipe.evaluate.read_twice else None
        if twice is not None:
            models |= {f"{name}{READ_TWICE}": load for name, load in models.items()}
        trained = ("hybrid",) if recipe.keeps_base else (HEADS_OFF, "hybrid")
        models |= {name: lambda: run.model("trained") for name in trained}
        teacher, skipped = _teacher_arm(run)
        models |= teacher
        arms: dict[str, Arm] = {}
        sizes: dict[str, Any] = {}
        example = None
        for index, (name, load) in enumerate(models.items()):
            model = load()
            if name in ("base", "hybrid"):
                sizes[name] = asdict(sizes_of(model))
            given, section = prompts, recipe.evaluate
            tick = part_of(run.reporter, name, index, len(models))
            if twice is not None and name.endswith(READ_TWICE):
                given, section = twice, section.model_copy(update={"lm_eval": None})
            with heads_off(model) if name == HEADS_OFF else nullcontext():
                arms[name] = evaluate_model(model, run.tokenizer(), section, recipe.seed, given, tick)
            mark_seen(arms[name].summary, section, recipe.train)
            if name == "hybrid":
                example = _example(run, prompts, arms, model)
            del model  # before the next one is loaded
        _write_results(run, arms, {"sizes": sizes, "skipped": skipped, "example": example}, began)


def _teacher_arm(run: Run) -> tuple[dict[str, Callable[[], PreTrainedModel]], dict[str, str]]:
    """Return the teacher (of training, or of the splice) as an arm, or the reason to skip it, by the arm's name."""
    base = run.others.get(TRAIN_TEACHER) or run.others.get(SPLICE_TEACHER)
    if base is None:
        return {}, {}
    if not has_tokenizer(base):
        return {}, {"teacher": "it has no tokenizer"}
    if not encode_alike(load_tokenizer(base), run.tokenizer()):
        return {}, {"teacher": "its tokenizer differs from the base's, so the prompts would be different tokens"}
    return {"teacher": lambda: load_model(base).to(run.accelerator.device)}, {}


def _example(run: Run, prompts: PromptSet, arms: Mapping[str, Arm], hybrid: PreTrainedModel) -> dict[str, Any] | None:
    """Find a short prompt of a probe that the hybrid answers, if possible one of retrieval that the base does not.

    Returns:
        `prompt`, `wanted`, and `generated`, the text of base and hybrid; None if there is no such prompt.
    """
    probes, size = run.recipe.evaluate.probes, run.recipe.evaluate.batch_size
    found = []
    for task, documents in prompts.choices.items():
        is_knowledge = PROBES[probes[task.partition("/")[0]]].knowledge
        for i, document in enumerate(documents):
            is_short = len(document.text) <= LONGEST_EXAMPLE and len(answer_list(document)) == 1
            if is_short and arms["hybrid"].correct[task][i]:
                order = (is_knowledge, bool(arms["base"].correct[task][i]), len(document.text))
                found.append((order, document))
    best = [document for _, document in sorted(found, key=lambda entry: entry[0])[:size]]
    if not best:
        return None
    models = {"base": run.base(), "hybrid": hybrid}
    texts = {name: exact_answers(model, run.tokenizer(), best, size) for name, model in models.items()}
    for i, document in enumerate(best):
        if texts["hybrid"].correct[i]:
            prompt = document.text[: document.questions[-1].answer[0]]
            generated = {name: answers.generated[i] for name, answers in texts.items()}
            return {"prompt": prompt, "wanted": texts["hybrid"].wanted[i], "generated": generated}
    return None


def _write_results(run: Run, arms: dict[str, Arm], more: Mapping[str, Any], began: float) -> None:
    """Write the figures, results.json and report.html. `more` are entries of the results, left out where empty."""
    from surgery.report.figures.by_value import held_out_accuracy  # matplotlib is slow to import
    from surgery.report.figures.costs import costs_by_length
    from surgery.report.figures.curves import accuracy_by_pairs

    recipe = run.recipe
    summaries = {name: arm.summary for name, arm in arms.items()}
    labels, costs = {name: arm_label(name, recipe) for name in arms}, None
    with new_folder(run.folder / "figures" / "evaluate") as figures:
        held_out = summaries["hybrid"].get("held_out", {})
        names = [name for name, entry in held_out.items() if "accuracy" in entry]  # data with answers
        if names:
            own = {name: {arm: summaries[arm]["held_out"][name] for arm in ordered_arms(summaries)} for name in names}
            held_out_accuracy(own, labels, figures)
        if summaries["base"]["kv_retrieval"]:
            by_pairs = {name: arm["kv_retrieval"] for name, arm in summaries.items()}
            accuracy_by_pairs(by_pairs, figures, trained_pairs(recipe), labels=labels)
        _draw_attention(run, figures)
        if (section := recipe.evaluate.efficiency) is not None:
            costs = efficiency({"base": run.base(), "hybrid": run.model("trained")}, section)
            costs_by_length(costs["arms"], figures, costs["where"])
    spliced = () if recipe.splice is None else ("locate", "plan", "splice")
    text = () if recipe.train.base_texts is None else ("text",)
    before = (*spliced, *text, "train", "control")
    seconds = {name: (run.rundir.manifest(name) or {}).get("seconds", 0.0) for name in before}
    inserted = [{"form": g.form, "before": g.before} for g in run.plan().grafts if g.form != "head"]
    optional = {
        **more,
        "inserted": inserted,
        "answer_spans": run.answer_spans,
        "held_out_examples": side_by_side({name: arm.examples for name, arm in arms.items()}),
        "training": run.trained_steps(),
        "efficiency": costs,
    }
    results = {
        "heads": [str(h) for h in run.plan().heads],
        "arms": summaries,
        **compare_arms(arms, recipe.seed),
        **{name: entry for name, entry in optional.items() if entry},
        "step_zero_gap": read_json(run.folder / "splice.json") if recipe.splice is not None else None,
        "seconds": {**seconds, "evaluate": round(time.perf_counter() - began, 2)},
        "seed": recipe.seed,
        "recipe": recipe.model_dump(mode="json"),  # that of the folder may change before the next evaluation
        "versions": versions(),
    }
    write_json(run.folder / "results.json", results)
    files = [name for name in _LINKED if (run.folder / name).is_file()]
    page, figures = run.folder / "report.html", run.folder / "figures"
    write_report(page, recipe, run.plan(), run.heads(), results, figures, files)


def _draw_attention(run: Run, figures: Path) -> None:
    """Draw the attention of the first spliced head from the query over one prompt, before and after training."""
    batch = sample_batch(run, 1, pairs=min(16, run.recipe.locate.pairs))
    plan, rows = run.plan(), {}
    untrained = run.base if run.recipe.splice is None else partial(run.model, "spliced")
    for label, load in (("before training", untrained), ("after training", partial(run.model, "trained"))):
        with torch.no_grad():
            output = load()(batch.input_ids, use_cache=False, splice_queries=batch.query)
        rows[label] = output.splice_attentions[0][0, 0, 0].cpu().numpy()
    tokens = [run.tokenizer().decode([i]) for i in batch.input_ids[0].tolist()]
    marks = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
    places = {name: int(position[0, 0]) for name, position in marks.items()}
    from surgery.report.figures.attention import attention_map  # matplotlib is slow to import

    attention_map(rows, tokens, places, figures, str(plan.heads[0]))


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {
        "surgery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "accelerate": accelerate_version,
    }
