"""Print the tables of results, plans and sweeps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from surgery.commands.progress import out
from surgery.errors import RunError, reading
from surgery.files.atomic import read_json
from surgery.recipe import Recipe
from surgery.recipe.export import LAYER_FORMATS
from surgery.recipe.grid import label_of_values
from surgery.recipe.methods import UNRANKED
from surgery.report.results import (
    BEFORE,
    arm_label,
    cell_of,
    entries,
    example_of,
    label_of,
    ordered_arms,
    perplexity_text,
    rows_of,
    skipped_of_lm_eval,
    value_text,
)
from surgery.report.text import duration_text, size_text, visible
from surgery.report.verdict import verdict_of


def print_plan(estimate: dict[str, Any]) -> None:
    """Print a dry run: plan, cost of a step, memory, cache."""
    table = Table(title="Dry run", show_header=False)
    if estimate["shapes_from"]:
        table.add_row("shapes", f"from {estimate['shapes_from']}: the checkpoint is not available locally")
    origin, heads = estimate["heads_from"], estimate["heads"]
    if origin == "stand-in":
        origin = "not located yet: estimated with heads of the middle layer"
    if len(heads) > 8:
        heads = [*heads[:8], f"... {len(heads)} in total"]
    table.add_row("heads", f"{', '.join(heads)} ({origin})")
    for site in estimate["sites"]:
        if "form" in site:
            text = f"{site['form']} of {len(site['heads'])} heads before layer {site['before']} of the base"
            table.add_row(f"layer {site['layers'][0]}", text)
            continue
        copied = f" ({site['copied_width']} copied)" if "copied_width" in site else ""
        widths = f"query/key {site['qk_width']}{copied}, value {site['v_width']}"
        text = f"{len(site['heads'])} heads, {site['mode']}, init {site['init']}, {widths}"
        table.add_row(f"layer {site['layer']}", text)
    base = estimate["base_parameters"]
    notes = {
        "steps": " at most, fewer if a plateau is found" if estimate["until_plateau"] else "",
        "parameters": f" (the base has {base:,})" if base else "",
    }
    for key in ("parameters", "new_parameters", "trainable_parameters", "steps", "documents"):
        table.add_row(key.replace("_", " "), f"{estimate[key]:,}{notes.get(key, '')}")
    table.add_row("learning rates", estimate["learning_rates"])
    tokens, flops = estimate["tokens"], estimate["flops"]
    arms = ", including the control" if estimate["arms"] > 1 else ""
    table.add_row("tokens", f"{tokens['step']:,} per step, {tokens['run']:,} in total{arms}")
    table.add_row("", f"counted with {estimate['tokens_counted_with']}")
    flops_text = f"{flops['step']:.2e} per step, {flops['run']:.2e} in total{arms}, without elementwise operations"
    table.add_row("FLOPs", flops_text)
    table.add_row("time", _time_text(estimate, arms))
    out.print(table)
    if estimate["code"]:
        out.print(f"{estimate['code']}.", soft_wrap=True)
    _print_memory(estimate)
    if estimate["locating"]:
        out.print(f"Memory while locating: {estimate['locating']}.")
    lengths = [key for key in estimate["cache"]["hybrid"] if key not in ("state", "kv_per_token")]
    out.print("Cache of one sequence while decoding:")
    table = Table("", "states", "KV per token", *(f"{length} tokens" for length in lengths))
    for name, cache in estimate["cache"].items():
        table.add_row(name, *(size_text(cache[key]) for key in ("state", "kv_per_token", *lengths)))
    out.print(table)
    for text in estimate["notes"]:
        out.print(f"note: {text}.")


def _time_text(estimate: dict[str, Any], arms: str) -> str:
    found = estimate["time"]
    if found is None:
        return "not estimated: set hardware.tflops to the TFLOP/s that one GPU reaches in training"
    how = "from hardware.tflops"
    if found["measured_on"]:
        how = f"measured on this machine ({found['measured_on']}) with random weights"
    if found["load"] > 0.5:
        how += "; other programs are running, so this estimate is too high: repeat on an idle machine"
    most = "at most " if estimate["until_plateau"] else ""
    return f"{most}{duration_text(found['seconds'])} of training{arms}; {found['step']:.2g} s per step, {how}"


def _print_memory(estimate: dict[str, Any]) -> None:
    largest, fits = estimate["largest"], estimate["fits"]
    batch = f"{largest['rows']} documents of {largest['tokens']} tokens ({largest['source']})"
    out.print(f"Memory of one device while training; largest micro-batch: {batch}:")
    table = Table(show_header=False)
    notes = {
        "optimizer": "two AdamW moments in fp32",
        "activations": "saved for the backward pass; fused kernels save less",
        "temporaries": "further peak memory, without fused kernels",
    }
    for key, size in estimate["memory"].items():
        if size:
            table.add_row(key.replace("_", " "), size_text(size), notes.get(key, ""))
    out.print(table)
    if fits is None:
        out.print("Set hardware.memory_gib to check whether the run fits.")
        return
    left = size_text(abs(fits["left"]))
    verdict = f"fits, {left} left" if fits["fits"] else f"does not fit: needs {left} more"
    count, each = (f"{fits['count']} x ", " each") if fits["count"] > 1 else ("", "")
    out.print(f"{count}{fits['gpu']}, {fits['memory_gib']:g} GiB{each}: {verdict}.")
    if fits["fits"]:
        return
    if -fits["left"] >= sum(estimate["memory"][key] for key in ("activations", "temporaries")):
        out.print("Nothing is left for documents. Set train.trainable to new_heads or lora, or base.dtype to bfloat16.")
    elif largest["rows"] > 1:
        out.print("Set a smaller train.micro_batch.")
    else:
        out.print("One document is too long: shorten it, or set train.gradient_checkpointing.")


def print_model(name: str, config: Any, model: Any) -> None:
    """Print family, mixers, heads, parameters and cache size of a model, which may be on the meta device."""
    from surgery.models.inserted import inserted_entries  # imports torch
    from surgery.models.lookup import family_of, geometry_of
    from surgery.models.runtime import run_device
    from surgery.models.sizes import sizes_of
    from surgery.models.torch_scans import code_text

    geometry, family = geometry_of(config), family_of(config)
    sizes, code = sizes_of(model), code_text(model, run_device())
    out.print(f"{name}: {config.model_type}, family {family.name}, geometry {geometry}")
    new = f", of which {sizes.new_parameters:,} in spliced heads" if sizes.new_parameters else ""
    out.print(f"{sizes.parameters:,} parameters{new}")
    sites = family.sites(config)
    where = f"can be spliced into {len(sites)} layers" if sites else f"cannot be spliced: {family.why_not(config)}"
    out.print(f"attention {where}")
    if code:
        out.print(code, soft_wrap=True)
    spliced = {site["layer"]: site for site in getattr(config, "splice", None) or []}
    inserted = {layer: entry for entry in inserted_entries(config) for layer in entry["layers"]}
    table = Table("mixer", "module", "kind", "heads", "head width", "groups", "state", "spliced heads")
    for spec in family.mixers(config):
        site = spliced.get(spec.layer) if spec.is_ssm else None
        note = f"{site['heads']} {site['mode']}, init {site['init']}" if site else ""
        note = f"inserted, {inserted[spec.layer]['form']}" if spec.layer in inserted else note
        heads = str(spec.num_heads) if spec.native_heads else f"{spec.num_heads} groups of channels"
        numbers = (str(n) for n in (spec.head_dim, spec.num_groups, spec.state_size))
        table.add_row(spec.name, spec.path, spec.kind, heads, *numbers, note)
    out.print(table)
    table = Table("tokens", "state bytes", "KV bytes", title="Cache of one sequence, fp32")
    for label, tokens in (("1k", 1024), ("32k", 32 * 1024), ("1M", 1024 * 1024)):
        table.add_row(label, f"{sizes.state_bytes:,}", f"{sizes.kv_bytes(tokens):,}")
    out.print(table)


def print_heads(folder: Path, most: int = 10) -> None:
    """Print the best heads of a run and the cost of measuring them."""
    heads = read_json(folder / "heads.json")
    with reading(str(folder / "locate.json"), None, "Locate again.", RunError):
        cost = read_json(folder / "locate.json")
    chosen = {scored["head"] for scored in heads["chosen"]}
    measured = (name for scored in heads["heads"] for name in scored["scores"])
    columns = list(dict.fromkeys(name for name in measured if not name.endswith("_accuracy")))
    selected = UNRANKED.get(heads["method"], f"selected by {heads['method']}")
    table = Table(title=f"{folder}: heads, best first; * {selected}")
    for name in ("head", "role", "reads", *columns):
        table.add_column(name.replace("_", " "), justify="left" if name in ("head", "role", "reads") else "right")
    shown = [scored for rank, scored in enumerate(heads["heads"]) if rank < most or scored["head"] in chosen]
    for scored in shown:
        name = f"{scored['head']}{' *' if scored['head'] in chosen else ''}"
        values = (scored["scores"].get(column) for column in columns)
        cells = (f"{v['value']:+.3f} [{v['low']:+.2f}, {v['high']:+.2f}]" if v else "" for v in values)
        table.add_row(name, scored["role"], (scored["reads"] or "").replace("_", " "), *cells)
    out.print(table)
    clean, passes = heads["clean"]["accuracy"]["value"], cost["passes"] / cost["prompts"]
    text = f"{cost['prompts']:.0f} prompts, clean accuracy {clean:.3f}; {passes:.1f} forward passes per prompt in "
    text += f"{cost['seconds']:.0f} s, peak memory {cost['peak_bytes'] / 2**30:.2f} GiB"
    out.print(text)
    out.print(f"page: {folder / 'locate.html'}; scores: {folder / 'heads.csv'}")


def print_results(folder: Path, recipe: Recipe) -> None:
    """Print the tables of a finished run or an export, the verdict, and what can be done next."""
    results = read_json(folder / "results.json")
    arms = {name: results["arms"][name] for name in ordered_arms(results["arms"])}  # the hybrid first
    table = Table("", title=f"{folder}: heads {', '.join(results['heads'])}")
    for name in arms:
        table.add_column(arm_label(name, recipe), justify="right")
    rows = rows_of(arms, recipe.evaluate.probes)
    for place, found in rows.shown:
        label = label_of(place, next(entry for entry in found if entry is not None))
        table.add_row(label, *("not measured" if entry is None else value_text(entry) for entry in found))
    out.print(table)
    if rows.at_chance:
        out.print(f"Hidden, since every model is at chance: {', '.join(rows.at_chance)}.")
    _print_skipped(arms)
    tuned = recipe.splice is None
    labels = {"base": BEFORE if tuned else "base", "hybrid": "after fine-tuning" if tuned else "hybrid"}
    for name, examples in results.get("held_out_examples", {}).items():
        table = Table("prompt", "wanted", *labels.values(), title=f"{name}: {len(examples)} held-out rows")
        for row in examples:
            texts = (visible(row["generated"].get(arm, ""), 24) for arm in labels)
            table.add_row(visible(row["prompt"], 48), visible(row["wanted"], 24), *texts)
        out.print(table)
    verdict = verdict_of(results, recipe)
    for text in (*verdict.advice, verdict.sentence):
        out.print(text, soft_wrap=True)
    if (folder / "report.html").is_file():
        out.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    export = folder if (folder / "export.json").is_file() else folder / "export"
    if (export / "export.json").is_file():
        _print_next(export, example_of(results), recipe)


def _print_skipped(arms: dict[str, Any]) -> None:
    for task, reason in skipped_of_lm_eval(arms).items():
        out.print(f"lm-eval did not run {task}: {reason}")


def _print_next(export: Path, example: Mapping[str, Any] | None, recipe: Recipe) -> None:
    """Print the commands that use the exported hybrid, with a prompt that it answers."""
    name, form = shlex.quote(str(export)), read_json(export / "export.json").get("format", "transformers")
    # A hybrid with inserted layers is no `transformers` export, and `gguf` needs the place of llama.cpp.
    same = " export.format=nemotron_h" if form in LAYER_FORMATS else ""
    lines = [f"generate {name} 'PROMPT'", f"finetune {name} DATA.jsonl{same}", f"publish {name} OWNER/NAME"]
    prompt = example["prompt"].replace("\n", " ") if example is not None else ""
    # `generate` reads \n as a line end, and a dash as an option; other characters could change the terminal
    if example is not None and "\\" not in prompt and not prompt.startswith("-") and prompt.isprintable():
        shown = shlex.quote(example["prompt"].replace("\n", "\\n"))
        answers = [f"wanted {visible(example['wanted'].strip(), 40)}"]
        answers += [
            f"{arm_label(a, recipe)} {visible(example['generated'][a].strip(), 40)}" for a in ("hybrid", "base")
        ]
        lines[0] = f"generate {name} {shown}\n    {'; '.join(answers)}"
    out.print("next:")
    for line in lines:
        out.print(f"  surgery {line}", soft_wrap=True)


def print_comparison(comparison: dict[str, Any], folder: Path) -> None:
    """Print a table of tasks by model. Marks results that differ significantly from the first model's."""
    names = list(comparison["arms"])
    table = Table("", *names, title=str(folder))
    rows = {name: dict(entries(arm)) for name, arm in comparison["arms"].items()}
    tests = {name: comparison["comparisons"].get(name, {}).get(names[0], {}) for name in names}
    for path, entry in rows[names[0]].items():
        cells = [cell_of(rows[name].get(path)) for name in names]
        marks = [" *" if tests[name].get("/".join(path), {}).get("significant") else "" for name in names]
        table.add_row(label_of(path, entry), *(cell + mark for cell, mark in zip(cells, marks, strict=True)))
    out.print(table)
    if any(test["significant"] for of_model in tests.values() for test in of_model.values()):
        out.print(f"* differs from {names[0]}: exact McNemar test at 0.05, Holm-corrected over all tasks")
    for name, reason in comparison["skipped"].items():
        out.print(f"{name}: {reason}")
    _print_skipped(comparison["arms"])
    out.print(f"all numbers: {folder / 'results.json'}; figures: {folder / 'figures'}")


def print_analysis(analysis: dict[str, Any], folder: Path) -> None:
    """Print the accuracies of every arm, and the size of the minimal model."""
    tasks = list(analysis["chance"])
    table = Table("arm", *(task.replace("_", " ") for task in tasks), "perplexity", title=str(folder))
    for name, scores in analysis["tasks"].items():
        cells = (f"{scores[t]['accuracy']:.3f}{' *' if scores[t].get('worse') else ''}" for t in tasks)
        table.add_row(name, *cells, perplexity_text(scores["perplexity"]))
    table.add_row("chance", *(f"{analysis['chance'][task]:.3f}" for task in tasks), "")
    out.print(table)
    out.print("* worse than the base: exact McNemar test at 0.05, Holm-corrected over the arms")
    if analysis["minimal"] is not None:
        text = "minimal model: {layers} of {of} layers; KV accuracy {accuracy:.3f}, base {base:.3f} (p = {p_value:.2g})"
        out.print(text.format(**analysis["minimal"]))


def print_sweep(summary: dict[str, Any], folder: Path) -> None:
    """Print the table of a sweep in Markdown."""
    from surgery.report.sweep_report import caption_of, markdown_of

    for line in (markdown_of(summary), caption_of(summary), f"page: {folder / 'sweep.html'}; all numbers: sweep.json"):
        out.print(line, soft_wrap=True)


def print_sweep_plan(plan: dict[str, Any], folder: Path) -> None:
    """Print which stages of which runs a sweep would run, and which it would take from other runs."""
    stages = list(dict.fromkeys(stage for run in plan["runs"].values() for stage in run))
    rows = [[name, *(run.get(stage, "") for stage in stages)] for name, run in plan["runs"].items()]
    for row in (["run", *stages], ["---"] * (len(stages) + 1), *rows):
        out.print(f"| {' | '.join(row)} |", soft_wrap=True)
    for control in plan["controls"]:
        values = label_of_values(control["values"])
        arm = "base" if control["arm"] == "base" else "control"
        out.print(f"{values}: the {arm} of {control['run']}", soft_wrap=True)
    out.print(f"folder: {folder}", soft_wrap=True)
