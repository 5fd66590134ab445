"""Write the report of a run: one HTML file without scripts, its figures embedded as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.recipe import Recipe, to_yaml
from surgery.recipe.methods import UNRANKED, gloss_of
from surgery.recipe.public import public_name, public_recipe
from surgery.report.heads_page import scored_heads
from surgery.report.results import (
    answer_spans_text,
    arm_label,
    example_of,
    label_of,
    limits_of,
    measurements_of,
    ordered_arms,
    p_value_of,
    rows_of,
    steps_text,
)
from surgery.report.templates import embedded_svg, write_html
from surgery.report.text import duration_text, visible
from surgery.report.verdict import tiles_of, verdict_of
from surgery.types import HeadSet, Plan

# Figures by the name that the template uses: file in the run's folder of figures, and alternative text.
_FIGURES = {
    "own_data": ("evaluate/held_out_accuracy", "Exact match on held-out rows of your data, for every model"),
    "accuracy": ("evaluate/accuracy_by_pairs", "Accuracy on KV-retrieval by number of pairs, for every model"),
    "heads": ("locate/head_maps", "Scores and role of every head"),
    "training": ("training/training", "Losses of the hybrid by step"),
    "control": ("no_splice_training/no_splice_training", "Losses of the control by step"),
    "efficiency": ("evaluate/efficiency", "Speed and memory of every model by prompt length"),
}
_TRAINED = {"all": "all weights", "new heads": "the new heads only", "lora": "the new heads and LoRA adapters"}
_Values = dict[str, Any]


def write_report(
    path: Path,
    recipe: Recipe,
    plan: Plan,
    heads: HeadSet | None,
    results: Mapping[str, Any],
    figures: Path,
    files_beside: Sequence[str] = (),
) -> Path:
    """Write the report to `path` and return it, without the sections that have nothing to show.

    Equal inputs give equal bytes.

    Args:
        heads: None if the selection of the heads is not known.
        results: content of results.json.
        figures: the run's folder of figures.
        files_beside: names of files next to the report, which the page links.
    """
    arms = results["arms"]
    seconds = {name: duration_text(s) for name, s in results.get("seconds", {}).items() if s}
    maps = sorted((figures / "evaluate").glob("attention_*.svg"))
    alt = "Attention of {} on one prompt, before and after training"
    values = {
        "name": recipe.name,
        **_operation(recipe, plan, heads, results),
        "train_time": seconds.get("train"),
        "arms": arms,
        "verdict": verdict_of(results, recipe),
        "base_label": arm_label("base", recipe),
        "tiles": tiles_of(results, recipe),
        "files": [name for name in files_beside if name != path.name],
        "example": example_of(results),
        "figures": {name: embedded_svg(figures / f"{stem}.svg", text) for name, (stem, text) in _FIGURES.items()},
        "contrasts": _contrasts(results, recipe),
        "gap_closed": _gap_closed(results),
        "measurements": measurements_of(results, recipe),
        "answer_spans": {name: answer_spans_text(counts) for name, counts in results.get("answer_spans", {}).items()},
        "examples": _examples(results, recipe),
        "spliced": _spliced(plan, heads),
        "attention_maps": [embedded_svg(map_, alt.format(map_.stem.removeprefix("attention_"))) for map_ in maps],
        "costs": _costs(results, recipe),
        "costs_where": results.get("efficiency", {}).get("where", ""),
        "seed": results.get("seed", recipe.seed),
        "times": ", ".join(f"{name} {time}" for name, time in seconds.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items()),
        "limits": limits_of(recipe, results),
        "recipe": to_yaml(public_recipe(recipe), defaults=False),
        "all_settings": to_yaml(public_recipe(recipe)),
    }
    return write_html(path, "run_report.html.j2", values)


def _operation(recipe: Recipe, plan: Plan, heads: HeadSet | None, results: Mapping[str, Any]) -> _Values:
    """Values of the first paragraph: the splice, the model, and its training."""
    splice, train = recipe.splice, recipe.train
    trained = dict.fromkeys(stage.trainable for stage in train.sequence)
    in_order = " then ".join(name.replace("_", " ") for name in trained)
    generated = recipe.locate.examples if recipe.locate.data is None else recipe.locate.generated
    prompts = f"{generated} prompts of {recipe.locate.pairs} pairs" if generated else ""
    if recipe.locate.filler is not None and generated:
        low, high = recipe.locate.filler
        prompts += f" with {low} to {high} words between key and value"
    if recipe.locate.data is not None:
        prompts = f"prompts of {recipe.locate.data.public_name}" + (f" and {prompts}" if prompts else "")
    kind: str = "fine-tuning"
    if splice is not None:
        form = splice.form if splice.form != "head" else None
        kind = form or ("layer" if splice.unit == "layer" else splice.mode)
    is_ranked = splice is not None and splice.select not in UNRANKED
    return {
        "kind": kind,
        "base": public_name(recipe.base.model),
        "head_count": len(plan.heads),
        "attention": f"{len(plan.heads)} softmax-attention head{'s' if len(plan.heads) > 1 else ''}",
        "heads": ", ".join(map(str, plan.heads)),
        "layers": ", ".join(str(graft.site.layer) for graft in plan.grafts),
        "places": ", ".join(str(graft.before) for graft in plan.grafts),
        "select": splice.select if splice is not None else None,
        "gloss": gloss_of(splice.select) if splice is not None else "",
        "prompts": prompts if is_ranked and heads is not None and heads.clean else None,
        "state": (plan.grafts[0].site.state_size, recipe.state_size) if recipe.state_size is not None else None,
        "steps": steps_text(results, recipe),
        "trained": _TRAINED.get(in_order, in_order),
    }


def _contrasts(results: Mapping[str, Any], recipe: Recipe) -> _Values | None:
    """Paired differences between the hybrid and every other arm, on held-out rows and retrieval; p-values last."""
    others = results.get("comparisons", {}).get("hybrid", {})
    arms = [arm for arm in ordered_arms(results["arms"]) if arm in others]
    measured = [task for task in next(iter(others.values()), {}) if task.startswith(("kv_retrieval/", "held_out/"))]
    shown = {place for place, _ in rows_of(results["arms"], recipe.evaluate.probes).shown}
    rows = []
    for task in sorted(measured, key=lambda task: not task.startswith("held_out/")):
        path = tuple(task.split("/", 1 if task.startswith("held_out") else -1))
        if path not in shown:
            continue
        tests = [others[arm][task] for arm in arms]
        differences = [
            f"{100 * test['difference']:+.1f} [{100 * test['low']:+.1f}, {100 * test['high']:+.1f}]" for test in tests
        ]
        rows.append([label_of(path, {"accuracy": 0}), *differences, *map(p_value_of, tests)])
    short = {"no_splice": "control", "hybrid_heads_off": "attention off"}
    labels = [short.get(arm, arm_label(arm, recipe)) for arm in arms]
    columns = ["", *(f"minus {label}" for label in labels), *(f"p, {label}" for label in labels)]
    return {"columns": columns, "rows": rows} if rows else None


def _gap_closed(results: Mapping[str, Any]) -> list[list[str]]:
    """Fraction of the gap between control and teacher that the hybrid closes, if a teacher was evaluated."""
    rows = []
    for task, gap in results.get("gap_closed", {}).items():
        if task.startswith("kv_retrieval/"):
            text = f"not computed: {gap.get('reason', '')}"
            if gap["value"] is not None:
                text = f"{gap['value']:.2f} [{gap['low']:.2f}, {gap['high']:.2f}]"
            rows.append([label_of(tuple(task.split("/")), {"accuracy": 0}), text])
    return rows


def _examples(results: Mapping[str, Any], recipe: Recipe) -> list[_Values]:
    """Tables of wanted and generated texts, one for each data set of the user."""
    tables = []
    for name, rows in results.get("held_out_examples", {}).items():
        arms = [arm for arm in ordered_arms(rows[0]["generated"]) if arm != "hybrid_heads_off"]
        columns = ["prompt", "wanted", *(arm_label(arm, recipe) for arm in arms)]
        cells = [
            [
                visible(row["prompt"], 100),
                *(visible(text, 60) for text in (row["wanted"], *map(row["generated"].get, arms))),
            ]
            for row in rows
        ]
        tables.append({"name": name, "columns": columns, "rows": cells})
    return tables


def _spliced(plan: Plan, heads: HeadSet | None) -> list[list[str]]:
    """Table of the spliced heads with their roles and scores."""
    rows = []
    located = {s.head: s for s in scored_heads(heads)} if heads is not None else {}
    for graft in plan.grafts:
        for head in (head for head in plan.heads if head.layer == graft.site.layer):
            role, scores = (located[head].role, located[head].scores) if head in located else ("unknown", {})
            margins = [
                f"{name.replace('_', ' ')} {score.value:+.2f} [{score.low:+.2f}, {score.high:+.2f}]"
                for name, score in scores.items()
                if "accuracy" not in name
            ]
            rows.append([str(head), graft.how, graft.init, role, "; ".join(margins)])
    return rows


def _costs(results: Mapping[str, Any], recipe: Recipe) -> list[list[str]]:
    """Table of speed and memory relative to the base, for every batch size and prompt length."""
    if not results.get("efficiency"):
        return []
    (_, base), *others = results["efficiency"]["arms"].items()
    rows = []
    for i, reference in enumerate(base):
        for name, costs in others:
            cost = costs[i]
            memory = [c["state_bytes"] + c["kv_bytes"] for c in (cost, reference)]
            ratios = [
                reference["time_to_first_token"] / cost["time_to_first_token"],
                cost["decode_tokens_per_second"] / reference["decode_tokens_per_second"],
                memory[0] / memory[1],
                cost["peak_bytes"] / reference["peak_bytes"],
            ]
            size = f"{int(reference['rows'])} x {int(reference['tokens'])} tokens"
            rows.append([size, arm_label(name, recipe), *(f"{r:.2f}x" for r in ratios), f"{cost['spread']:.0%}"])
    return rows
