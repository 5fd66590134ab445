"""Labels and table cells for the numbers of results.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from surgery.probes.registry import PROBES
from surgery.recipe import Recipe
from surgery.recipe.export import EXPORT_FORMATS
from surgery.recipe.public import public_name

LONGEST_EXAMPLE = 600  # characters of a prompt that is shown whole
# Keys of `arms` in results.json, in the order of the table's columns, with their labels.
ARM_LABELS = {
    "hybrid": "hybrid",
    "no_splice": "control (trained, no splice)",
    "no_splice_read_twice": "control, prompt read twice",
    "base": "base",
    "base_read_twice": "base, prompt read twice",
    "hybrid_heads_off": "hybrid, attention off",
}
BEFORE = "before fine-tuning"  # label of the arm `base` with `splice: null`

_HELD_OUT = {"first_token": "first token", "loss": "loss in nats per answer token"}  # in addition to exact match

Place = tuple[str, ...]  # keys that lead to a number in an arm of results.json: ("kv_retrieval", "16")


def entries(tree: Mapping[str, Any], path: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the path and the entry of every accuracy, perplexity, loss and score of lm-eval in an arm of results.json.

    The user's held-out rows come first. A score of lm-eval has the path ("lm_eval", TASK, METRIC).
    """
    for key, value in sorted(tree.items(), key=lambda item: bool(path) or item[0] != "held_out"):
        if key == "lm_eval" and not path:
            yield from _lm_eval_scores(value)
        elif isinstance(value, Mapping):
            if any(not isinstance(value.get(unit, {}), Mapping) for unit in ("accuracy", "perplexity", "nats")):
                yield (*path, key), value  # a data set may have such a name: then the value is an entry of its own
            yield from entries(value, (*path, key))
        elif not path and isinstance(value, int | float):  # of a probe whose scoring is perplexity
            yield (key,), {"perplexity": value}


def _lm_eval_scores(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    for task, metrics in tasks.items():
        for key, value in metrics.items():
            metric, _, of_filter = key.partition(",")  # `acc,none`
            if of_filter and not metric.endswith("_stderr"):
                name = metric if of_filter == "none" else f"{metric} ({of_filter})"
                yield ("lm_eval", task, name), {"score": value, **({"n": metrics["n"]} if "n" in metrics else {})}


def skipped_of_lm_eval(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Tasks of lm-eval that were not run in any arm, with the reason."""
    return {
        task: metrics["skipped"]
        for arm in arms.values()
        for task, metrics in arm.get("lm_eval", {}).items()
        if "skipped" in metrics
    }


def label_of(path: Place, entry: Mapping[str, Any]) -> str:
    """Row label of an entry."""
    task, *rest = path
    if task == "lm_eval" and len(rest) == 2:
        return f"{rest[0]} (lm-eval), {rest[1]}"
    if task == "held_out" and rest:
        name = f"{rest[0]}, held-out rows"
        if len(rest) > 1:
            return ", ".join([name, *(_HELD_OUT.get(part, part) for part in rest[1:])])
        return f"{name}, exact match" if "accuracy" in entry else f"perplexity of {name}"
    name, unit = (PROBES[task].label, PROBES[task].unit) if task in PROBES else (task.replace("_", " "), "")
    parts = [f"{part} {unit}".strip() if part.isdigit() else part.replace("_", " ") for part in rest]
    if entry.get("seen"):
        name, parts = name.replace("held-out half", "other half"), [*parts, "seen in training"]
    return ", ".join([name, *parts])


def ordered_arms(arms: Iterable[str]) -> list[str]:
    """Sort arms for display: the hybrid, the control, the base, the hybrid without its attention, then others."""
    known = list(ARM_LABELS)
    return sorted(arms, key=lambda arm: (known.index(arm) if arm in known else len(known), arm))


def arm_label(arm: str, recipe: Recipe) -> str:
    """Column label of an arm. With `splice: null`, the base is the hybrid before fine-tuning."""
    if recipe.splice is None and arm == "base":
        return BEFORE
    if recipe.splice is None and arm == "base_read_twice":
        return f"{BEFORE}, prompt read twice"
    if recipe.splice is None and arm == "no_splice" and recipe.control is not None:
        return f"control ({public_name(recipe.control.model)}, same training)"
    return ARM_LABELS.get(arm, arm.replace("_", " "))


def reference_of(arms: Iterable[str]) -> str:
    """Arm that the hybrid is tested against: the control, or the base if no control was trained."""
    return "no_splice" if "no_splice" in arms else "base"


def tests_of(results: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    """Tests of the hybrid against a reference, by task: exact, two-sided, with Holm's correction. See `contrasts`."""
    return dict(results.get("comparisons", {}).get("hybrid", {}).get(reference, {}))


def example_of(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A prompt that the hybrid answers, a short row of the user's data or of a probe, with the text of each arm."""
    own = [row for rows in results.get("held_out_examples", {}).values() for row in rows]
    right = [row for row in own if row["generated"]["hybrid"].strip() == row["wanted"].strip()]
    whole = [row for row in right if len(row["prompt"]) <= LONGEST_EXAMPLE]
    return min(whole, key=lambda row: len(row["prompt"]), default=results.get("example"))


class Rows(NamedTuple):
    """Rows of the table of all measurements, and what is hidden.

    Attributes:
        shown: the place of each row and its entries, one for each arm, or None if not measured.
        repeats: number of hidden second scores of the same prompts, such as generation or the first token, which have
            the accuracies of the prompts' own row in every arm.
        at_chance: labels of hidden tasks other than KV-retrieval in which the interval of every arm contains chance
            and no arm generates an answer, such as facts that the base never learned.
    """

    shown: list[tuple[Place, list[Mapping[str, Any] | None]]]
    repeats: int
    at_chance: list[str]


def rows_of(arms: Mapping[str, Mapping[str, Any]], probes: Mapping[str, str]) -> Rows:
    """Choose the rows of the table of all measurements, for the columns `arms`. `probes`: name of the probe by task."""
    by_arm = [dict(entries(arm)) for arm in arms.values()]
    shown: list[tuple[Place, list[Mapping[str, Any] | None]]] = []
    repeats, at_chance = 0, dict[Place, str]()
    for place in dict.fromkeys(place for arm in by_arm for place in arm):
        found = [arm.get(place) for arm in by_arm]
        measured = [entry for entry in found if entry is not None]
        parents = [arm.get(place[:-1], {}).get("accuracy") for arm in by_arm]
        if place[:-1] in at_chance:
            continue
        if probes.get(place[0], place[0]) != "kv_retrieval" and all(map(_at_chance, measured)):
            at_chance[place] = label_of(place, measured[0])
        elif all(entry and entry.get("accuracy", "") == parent for entry, parent in zip(found, parents, strict=True)):
            repeats += 1
        else:
            shown.append((place, found))
    return Rows(shown, repeats, list(at_chance.values()))


def _at_chance(entry: Mapping[str, Any]) -> bool:
    """Whether the interval of an accuracy contains chance, and no answer was generated."""
    if "chance" not in entry or entry.get("generated", {}).get("accuracy"):
        return False
    return bool(entry["low"] <= entry["chance"] <= entry["high"])


def measurements_of(results: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Table of every arm on every task, with the p-value of the hybrid against the control (or the base), as text.

    `against` names what the hybrid is tested against; it is empty without tests. `repeats` and `at_chance` are the
    hidden rows, and `skipped` the tasks of lm-eval that were not run.
    """
    arms = {arm: results["arms"][arm] for arm in ordered_arms(results["arms"])}
    tests = tests_of(results, reference_of(arms))
    table = rows_of(arms, recipe.evaluate.probes)
    rows = []
    for place, found in table.shown:
        first: Mapping[str, Any] = next((entry for entry in found if entry is not None), {})
        p_value = [p_value_of(tests.get("/".join(place)))] if tests else []
        rows.append([label_of(place, first), *map(cell_of, found), str(first.get("n", "")), *p_value])
    name = "control" if "no_splice" in arms else "model before training"
    last = [f"p, against the {name}"] if tests else []
    return {
        "columns": ["", *(arm_label(arm, recipe) for arm in arms), "prompts", *last],
        "rows": rows,
        "repeats": table.repeats,
        "at_chance": ", ".join(table.at_chance),
        "skipped": [f"{task}: {reason}" for task, reason in skipped_of_lm_eval(arms).items()],
        "against": name if tests else "",
    }


def p_value_of(test: Mapping[str, Any] | None) -> str:
    """Format a test: its p-value, with a star if it is significant; empty if there is none."""
    return "" if test is None else f"{p_text(test['p_two_sided'])}{' *' if test['significant'] else ''}"


def cell_of(entry: Mapping[str, Any] | None) -> str:
    """Format an accuracy with its interval, a perplexity, a loss, or a score of lm-eval."""
    if entry is None:
        return "not measured"
    interval = f" [{entry['low']:.3f}, {entry['high']:.3f}]" if "accuracy" in entry and "low" in entry else ""
    return value_text(entry) + interval


def value_text(entry: Mapping[str, Any]) -> str:
    """Format an accuracy, a perplexity, a loss in nats, or a score of lm-eval."""
    if "perplexity" in entry:
        return perplexity_text(entry["perplexity"])
    return next(f"{entry[unit]:.3f}" for unit in ("accuracy", "nats", "score") if unit in entry)


def p_text(p: float) -> str:
    """Format a p-value with two digits. Below 1e-300 it is not far from the smallest number that a float can hold."""
    return f"{p:.2g}" if p >= 1e-300 else "below 1e-300"


def perplexity_text(value: float) -> str:
    """Format a perplexity with three decimals, or in scientific notation from a million on."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.1e}"


def trained_steps(results: Mapping[str, Any], recipe: Recipe) -> int:
    """Number of steps of all stages of the hybrid. `results` has `training` if a stage could end at a plateau."""
    if "training" not in results:
        return recipe.train.num_all_steps
    return sum(stage["steps"] for stage in results["training"].values())


def steps_text(results: Mapping[str, Any], recipe: Recipe) -> str:
    """Format the number of steps, and where a plateau was found."""
    text, train = f"{trained_steps(results, recipe)} steps", recipe.train
    if not train.has_plateau:
        return text
    found = [str(stage["plateau"]) for stage in results.get("training", {}).values() if "plateau" in stage]
    where = f"plateau at step {' and '.join(found)}" if found else "no plateau was found"
    return f"{text} (of at most {train.num_all_steps}; {where})"


def limits_of(recipe: Recipe, results: Mapping[str, Any]) -> tuple[str, ...]:
    """Limits of the model, one or two sentences each."""
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    tasks = sorted({source.task for source in sources if source.task})
    data = [f"generated text ({', '.join(tasks)})"] * bool(tasks) + own_data(recipe)
    data += ["text that its base wrote"] * (recipe.train.base_texts is not None)
    trained = "Trained further" if recipe.splice is None else "Trained"
    return (
        f"{trained} for {steps_text(results, recipe)}, only on {' and '.join(data)}.",
        "The probes are generated from short words and invented facts. They measure retrieval, not real tasks.",
        "The spliced layers store keys and values for every token. Unlike the base's memory, theirs grows with length.",
        *EXPORT_FORMATS[recipe.export.format].limits,
    )


def trained_pairs(recipe: Recipe) -> tuple[int, int] | None:
    """Smallest and largest number of pairs of KV-retrieval in training, with values as long as those evaluated."""
    digits = {task.value_digits for task in recipe.evaluate.tasks if task.result_name == "kv_retrieval"}
    sources = [source for stage in recipe.train.sequence for source in stage.sources if source.task == "kv_retrieval"]
    retrieving = [source for source in sources if source.weights.uses("answer", "attention")]
    pairs = [n for source in retrieving if source.value_digits in (digits or {None}) for n in source.pairs]
    return (min(pairs), max(pairs)) if pairs else None


def own_data(recipe: Recipe) -> list[str]:
    """Public names of the user's data sets and files, sorted."""
    return sorted({data.public_name for data in recipe.train.own_data})


def answer_spans_text(counts: Mapping[str, int]) -> str:
    """Format the rows of one data set by the place of the answer: an entry of `answer_spans` in results.json."""
    text = f"ambiguous: {counts['ambiguous']}, missing: {counts['missing']}, found: {counts['found']}"
    if counts.get("marked"):
        text += f", marked in the data: {counts['marked']}"
    if counts.get("first_rows"):
        text += f" (first {counts['first_rows']} rows of the stream)"
    if not counts["found"] and not counts.get("marked"):
        text += ". No row supervises the attention of the new heads"
    return text
