"""What the command line prints: progress, tables. Owns: their form. Must never know: commands, how anything is done."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

out = Console(width=None if sys.stdout.isatty() else 140)  # a pipe has no width: do not cut names


class Bars:
    """One bar a stage that says what is being done; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, stage: str, what: str) -> None:
        """A stage begins."""
        if not out.is_terminal:
            out.print(f"{stage:>9}  {what} ...", highlight=False)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=out, transient=True)
        self._task = self._bar.add_task(f"{stage:>9}  {what}", total=None, note="")
        self._bar.start()

    def progress(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units of work."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif total >= 50 and done * 10 // total > (done - 1) * 10 // total:
            out.print(f"{'':>9}  {done} of {total}  {note}", highlight=False)

    def stop(self) -> None:
        """Removes the bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def finish(self, stage: str, seconds: float) -> None:
        """A stage is done."""
        self.stop()
        out.print(f"{stage:>9}  done in {seconds:.1f} s", highlight=False)

    def skip(self, stage: str, why: str) -> None:
        """A stage is not run."""
        out.print(f"{stage:>9}  skipped: {why}", highlight=False)


def print_plan(found: dict[str, Any]) -> None:
    """What a dry run found: the plan, what a step costs, memory, cache."""
    table = Table(title="What the run would do", show_header=False)
    if found["shapes_from"]:
        table.add_row("shapes", f"from {found['shapes_from']}; the checkpoint itself is not at hand")
    origin = (
        "not located yet: counted in the middle layer" if found["heads_from"] == "stand-in" else found["heads_from"]
    )
    heads = found["heads"] if len(found["heads"]) <= 8 else [*found["heads"][:8], f"... {len(found['heads'])} in all"]
    table.add_row("heads", f"{', '.join(heads)} ({origin})")
    for site in found["sites"]:
        text = f"{len(site['heads'])} heads, {site['mode']}, init {site['init']}, query/key {site['qk_width']}, "
        table.add_row(f"layer {site['layer']}", text + f"value {site['v_width']}")
    for key in ("parameters", "new_parameters", "trainable_parameters", "steps", "documents"):
        table.add_row(key.replace("_", " "), f"{found[key]:,}")
    tokens, flops = found["tokens"], found["flops"]
    arms = ", the control included" if found["arms"] > 1 else ""
    table.add_row("tokens", f"{tokens['step']:,} a step, {tokens['run']:,} in all{arms}")
    table.add_row("", f"counted with {found['tokens_counted_with']}")
    table.add_row("FLOPs", f"{flops['step']:.2e} a step, {flops['run']:.2e} in all{arms}; no elementwise work")
    out.print(table, highlight=False)
    _print_memory(found)
    lengths = [key for key in found["cache"]["hybrid"] if key not in ("state", "kv_per_token")]
    out.print("Kept for one sequence while decoding:", highlight=False)
    table = Table("", "states", "KV a token", *(f"{length} tokens" for length in lengths))
    for name, cache in found["cache"].items():
        table.add_row(name, *(size_of(cache[key]) for key in ("state", "kv_per_token", *lengths)))
    out.print(table, highlight=False)


def _print_memory(found: dict[str, Any]) -> None:
    """The memory table, and whether it fits."""
    largest, fits = found["largest"], found["fits"]
    batch = f"{largest['rows']} documents of {largest['tokens']} tokens ({largest['source']})"
    out.print(f"Memory of one device while training; largest micro-batch: {batch}:", highlight=False)
    table = Table(show_header=False)
    notes = {
        "optimizer": "AdamW's two moments, fp32",
        "activations": "kept for the backward pass, without kernels",
        "temporaries": "beside them at the worst moment, without kernels",
    }
    for key, size in found["memory"].items():
        table.add_row(key.replace("_", " "), size_of(size), notes.get(key, ""))
    out.print(table, highlight=False)
    if fits is None:
        out.print("hardware.memory_gib is not given: whether it fits is not said.", highlight=False)
        return
    left = size_of(abs(fits["left"]))
    verdict = f"fits, {left} left" if fits["fits"] else f"does not fit: {left} too much"
    out.print(f"{fits['count']} x {fits['gpu']}, {fits['memory_gib']:g} GiB each: {verdict}.", highlight=False)


def size_of(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"


def print_heads(folder: Path, most: int = 10) -> None:
    """The best heads of a run, and what measuring took."""
    heads = json.loads((folder / "heads.json").read_text(encoding="utf-8"))
    cost = json.loads((folder / "locate.json").read_text(encoding="utf-8"))
    chosen = {scored["head"] for scored in heads["chosen"]}
    columns = [name for name in heads["heads"][0]["scores"] if not name.endswith("_accuracy")]
    table = Table(title=f"{folder}: heads, best first; * chosen by {heads['method']}")
    for name in ("head", "role", "reads", *columns):
        table.add_column(name.replace("_", " "), justify="left" if name in ("head", "role", "reads") else "right")
    for scored in heads["heads"][:most]:
        name = f"{scored['head']}{' *' if scored['head'] in chosen else ''}"
        values = (scored["scores"].get(column) for column in columns)
        cells = (f"{v['value']:+.3f} [{v['low']:+.2f}, {v['high']:+.2f}]" if v else "" for v in values)
        table.add_row(name, scored["role"], (scored["reads"] or "").replace("_", " "), *cells)
    out.print(table)
    for group in heads["groups"]:
        if group["kind"] != "layer":
            lost = group["scores"]["ablation"]
            names = " ".join(group["heads"])
            out.print(f"{group['kind']:>9}  without {names}: margin {-lost['value']:+.3f}", highlight=False)
    clean = heads["clean"]["accuracy"]
    text = (
        "{:.0f} prompts, clean accuracy {:.3f}; {:.0f} forward passes of a prompt in {:.0f} s, peak memory {:.2f} GiB"
    )
    numbers = (cost["prompts"], clean["value"], cost["passes"], cost["seconds"], cost["peak_bytes"] / 2**30)
    out.print(text.format(*numbers), highlight=False)
    out.print(f"to look at: {folder / 'locate.html'}; scores: {folder / 'heads.csv'}", highlight=False)


def print_results(folder: Path) -> None:
    """The summary table of a finished run."""
    path = folder / "results.json"
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    _print_arms(f"{folder}: heads {', '.join(results['heads'])}", results["arms"])
    if (folder / "export").is_dir():
        out.print(f"hybrid checkpoint: {folder / 'export'}; figures: {folder / 'figures'}", highlight=False)


def _print_arms(title: str, arms: dict[str, Any]) -> None:
    """Every task by arm."""
    from surgery.report.results import entries, label_of, perplexity_text

    table = Table("", title=title)
    for name in arms:
        table.add_column(name.replace("_", " "), justify="right")
    rows = {name: dict(entries(arm)) for name, arm in arms.items()}
    for path, entry in next(iter(rows.values())).items():
        name = label_of(path, entry)
        if "accuracy" in entry:
            table.add_row(name, *(f"{row[path]['accuracy']:.3f}" for row in rows.values()))
        else:
            table.add_row(name, *(perplexity_text(row[path]["perplexity"]) for row in rows.values()))
    out.print(table)


def print_comparison(found: dict[str, Any], folder: Path) -> None:
    """Every task by model, and where a model differs from the first."""
    from surgery.report.results import cell_of, entries, label_of

    names = list(found["arms"])
    table = Table("", *(f"{name}" for name in names), title=f"{folder}")
    rows = {name: dict(entries(arm)) for name, arm in found["arms"].items()}
    tests = {name: found["comparisons"].get(name, {}).get(names[0], {}) for name in names}
    for path, entry in rows[names[0]].items():
        cells = [cell_of(rows[name].get(path)) for name in names]
        marks = [" *" if tests[name].get("/".join(path), {}).get("significant") else "" for name in names]
        table.add_row(label_of(path, entry), *(cell + mark for cell, mark in zip(cells, marks, strict=True)))
    out.print(table)
    out.print(f"* other than {names[0]}: exact McNemar at 0.05, Holm-corrected over all tasks", highlight=False)
    for reason in found["skipped"].values():
        out.print(reason, highlight=False)
    out.print(f"all numbers: {folder / 'results.json'}; figures: {folder / 'figures'}", highlight=False)


def print_analysis(found: dict[str, Any], folder: Path) -> None:
    """Arms against tasks, and the minimal model."""
    from surgery.report.results import perplexity_text

    tasks = list(found["chance"])
    table = Table("arm", *(task.replace("_", " ") for task in tasks), "perplexity", title=f"{folder}")
    for name, scores in found["tasks"].items():
        cells = (f"{scores[t]['accuracy']:.3f}{' *' if scores[t].get('worse') else ''}" for t in tasks)
        table.add_row(name, *cells, perplexity_text(scores["perplexity"]))
    table.add_row("chance", *(f"{found['chance'][task]:.3f}" for task in tasks), "")
    out.print(table)
    out.print("* worse than the base: exact McNemar at 0.05, Holm-corrected over the arms", highlight=False)
    if found["minimal"] is not None:
        text = "minimal model: {layers} of {of} layers; KV {accuracy:.3f} against {base:.3f} (p = {p_value:.2g})"
        out.print(text.format(**found["minimal"]), highlight=False)
