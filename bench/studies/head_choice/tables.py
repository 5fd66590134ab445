"""Tables of the report, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from bench.common import markdown_table
from bench.studies.head_choice.arms import COLUMNS, DEFAULT_BRANCH, DEFAULT_CHOOSER, DESIGNS, LAYER, PLAIN, WIDE
from bench.studies.head_choice.choosers import ROWS
from bench.studies.head_choice.regret import (
    Results,
    accuracy,
    best_accuracy,
    mean_over_seeds,
    regrets,
    worst_cases,
)
from surgery.types import Interval

MISSING = "missing"
TITLES = {column: "one layer" if column == LAYER else f"k = {column}" for column in COLUMNS}


def tables(results: Results, labels: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Make every table: name -> Markdown.

    Args:
        labels: headings of all bases of the study, in order.
        settings: budget and versions, by name.

    Returns:
        `settings`; `worst`: the largest regret of every chooser; `bases`: choices, accuracy and regret on each base
        that has choices, with headings.
    """
    bases = [base for base in labels if results.seeds(base)]
    sections = (f"### {labels[base][0].upper()}{labels[base][1:]}\n\n{_of_base(results, base)}\n" for base in bases)
    return {
        "settings": markdown_table(["setting", "value"], list(settings.items())) + "\n",
        "worst": _worst(results, list(labels)) + "\n",
        "designs": _designs(results, labels) + "\n",
        "default_branch": _default_branch(results, labels) + "\n",
        "bases": "\n".join(sections),
    }


def _designs(results: Results, labels: Mapping[str, str]) -> str:
    """Accuracy of every design at the default chooser's head, and of the control, by base."""
    rows = []
    for base in (base for base in labels if results.seeds(base)):
        seeds, trained = results.seeds(base), [results.answers.get((base, seed), {}) for seed in results.seeds(base)]
        heads = [results.chosen(base, seed, "1")[DEFAULT_CHOOSER] for seed in seeds]
        cells = [[arms.get(()) for arms in trained]]
        for name in DESIGNS:
            of_design = results if name == PLAIN else results.of_design(name)
            arms_by_seed = [of_design.answers.get((base, seed), {}) for seed in seeds]
            cells.append([arms.get(head) if head else None for arms, head in zip(arms_by_seed, heads, strict=True)])
        found = [mean_over_seeds([x for x in cell if x is not None]) for cell in cells]
        where = " / ".join("-".join(head or ()) for head in heads)
        rows.append([labels[base], where, *map(_accuracy_cell, found)])
    return markdown_table(["base", "head", "no splice", *(f"`{name}`" for name in DESIGNS)], rows)


def _default_branch(results: Results, labels: Mapping[str, str]) -> str:
    """Accuracy and regret of every chooser with copies alone and with the default branch, where both are finished."""
    wide, columns = results.of_design(DEFAULT_BRANCH), WIDE.values()
    places = [(base, c) for base in labels for c in columns if results.seeds(base) and wide.complete_seeds(base, c)]
    rows = []
    for name, chooser in ROWS.items():
        cells = []
        for base, column in places:
            for of_design in (results, wide):
                regret = regrets(of_design, base, column).get(name)
                cells += [_accuracy_cell(accuracy(of_design, base, name, column)), _regret_cell(regret)]
        rows.append([chooser.label, *cells])
    branches = ("copies alone", "default branch")
    parts = [f"{base}, {TITLES[column]}, {branch}" for base, column in places for branch in branches]
    return markdown_table(["chooser", *(title for part in parts for title in (part, "regret"))], rows)


def _of_base(results: Results, base: str) -> str:
    seeds = results.seeds(base)
    clean = ", ".join(f"{results.choices[base, seed]['clean']:.2f} (seed {seed})" for seed in seeds)
    return "\n".join(
        [
            f"Accuracy of the base on the locating prompts: {clean}. `/` separates the choices of different seeds.\n",
            _choices(results, base),
            f"\nAccuracy after training, `{base}`, mean over the seeds that were run for each arm. "
            "Do not compare rows of different seeds:\n",
            _accuracies(results, base),
            f"\nRegret in points of accuracy, `{base}`:\n",
            _regrets(results, base),
        ]
    )


def _choices(results: Results, base: str) -> str:
    shown = [column for column in COLUMNS if column != "8"]
    rows = []
    for name, chooser in ROWS.items():
        by_seed = [results.choices[base, seed]["choosers"].get(name) for seed in results.seeds(base)]
        measured = [choice for choice in by_seed if choice is not None]
        seconds = " / ".join(f"{choice['cpu_seconds']:.0f}" for choice in measured) or MISSING
        cells = []
        for column in shown:
            chosen = (choice["heads"].get(column, []) for choice in measured)
            names = (_layer_name(heads) if column == LAYER else " ".join(heads) for heads in chosen)
            cells.append(" / ".join(dict.fromkeys(names)) or MISSING)
        steps = " / ".join(dict.fromkeys(f"{choice.get('steps', 0):.0f}" for choice in measured)) or MISSING
        rows.append([chooser.label, *cells, seconds, steps])
    return markdown_table(["chooser", *(TITLES[c] for c in shown), "CPU seconds", "training steps"], rows)


def _layer_name(heads: list[str]) -> str:
    return heads[0].split("H")[0] if heads else MISSING


def _accuracies(results: Results, base: str) -> str:
    control = [results.answers.get((base, seed), {}).get(()) for seed in results.seeds(base)]
    without = _accuracy_cell(mean_over_seeds([x for x in control if x is not None]))
    rows = [["no splice", *[without] * len(COLUMNS)]]
    for name, chooser in ROWS.items():
        rows.append([chooser.label, *(_accuracy_cell(accuracy(results, base, name, c)) for c in COLUMNS)])
    best = [best_accuracy(results, base, column) for column in COLUMNS]
    rows.append(["best tried set", *(MISSING if found is None else f"{found[0]:.3f}" for found in best)])
    rows.append(["best set of half of the prompts, on the other half",
                 *(MISSING if found is None else f"{found[1]:.3f}" for found in best)])  # fmt: skip
    return markdown_table(["arm", *(TITLES[column] for column in COLUMNS)], rows)


def _accuracy_cell(interval: Interval | None) -> str:
    return MISSING if interval is None else f"{interval.value:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def _regrets(results: Results, base: str) -> str:
    found = {column: regrets(results, base, column) for column in COLUMNS}
    worst = worst_cases(results, [base])
    rows = []
    for name, chooser in ROWS.items():
        cells = [_regret_cell(found[column].get(name)) for column in COLUMNS]
        largest = f"{worst[name].regret.value:.1f}" if name in worst else MISSING
        rows.append([chooser.label, *cells, largest])
    finished = ["seeds, and choosers whose arm is finished", *(_finished(results, base, c) for c in COLUMNS), ""]
    return markdown_table(["chooser", *(TITLES[column] for column in COLUMNS), "largest"], [*rows, finished])


def _regret_cell(interval: Interval | None) -> str:
    return MISSING if interval is None else f"{interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}]"


def _finished(results: Results, base: str, column: str) -> str:
    """The complete seeds, and the state of the others."""
    complete = results.complete_seeds(base, column)
    parts = [f"seed {', '.join(map(str, complete))}" if complete else "no seed"]
    for seed in results.seeds(base):
        if seed not in complete:
            done, wanted = results.finished(base, seed, column)
            parts.append(f"{done} of {wanted} of seed {seed}")
    return "; ".join(parts)


def _worst(results: Results, bases: list[str]) -> str:
    """The largest regret of every chooser, over bases by column, then over everything."""
    by_column = {column: worst_cases(results, bases, [column]) for column in COLUMNS}
    whole = worst_cases(results, bases)
    rows = []
    for name, chooser in ROWS.items():
        cells = [f"{by_column[c][name].regret.value:.1f}" if name in by_column[c] else MISSING for c in COLUMNS]
        if name not in whole:
            rows.append([chooser.label, *cells, MISSING, ""])
            continue
        largest = whole[name]
        rows.append([chooser.label, *cells, _regret_cell(largest.regret), f"{largest.base}, {TITLES[largest.column]}"])
    counts = [max((w.measured for w in by_column[column].values()), default=0) for column in COLUMNS]
    total = sum(counts)
    rows.append(["bases with a regret", *(f"{n} of {len(bases)}" for n in counts),
                 f"{total} of {len(bases) * len(COLUMNS)} cases", ""])  # fmt: skip
    return markdown_table(["chooser", *(TITLES[column] for column in COLUMNS), "worst case", "where"], rows)
