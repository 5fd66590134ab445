"""Summarize results.json: one sentence on the hybrid against its control, and four numbers to look at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgery.probes.registry import PROBES
from surgery.recipe import Recipe
from surgery.report.results import BEFORE, Place, arm_label, entries, label_of, p_text, perplexity_text, trained_steps

Tone = Literal["better", "unclear", "worse"]
Entry = Mapping[str, Any]

_RISE = 1.02  # ratio of perplexities from which the verdict mentions a rise


@dataclass(frozen=True)
class Verdict:
    """One sentence on a run.

    Attributes:
        sentence: the verdict with its numbers.
        tone: `better` and `worse` are significant differences to the control; everything else is `unclear`.
    """

    sentence: str
    tone: Tone


@dataclass(frozen=True)
class Tile:
    """One number in large type, with what it measures above and what to compare it with below."""

    label: str
    value: str
    note: str


def main_place(arms: Mapping[str, Any], recipe: Recipe) -> Place | None:
    """Choose the task that a run is judged by.

    The user's held-out rows come first, then KV-retrieval at the largest trained number of pairs, then the first other
    task of retrieval. None if no accuracy was measured.
    """
    hybrid = dict(entries(arms["hybrid"]))
    own = [place for place in hybrid if place[0] == "held_out" and len(place) == 2 and "accuracy" in hybrid[place]]
    if own:
        return own[0]
    sizes, trained = _kv_sizes(hybrid), _trained_pairs(recipe)
    if sizes:
        return "kv_retrieval", str(max([size for size in sizes if size <= (trained or size)], default=sizes[0]))
    tasks = [place for place, entry in hybrid.items() if "accuracy" in entry]
    return next((place for place in tasks if not _is_knowledge(place, recipe)), tasks[0] if tasks else None)


def verdict_of(results: Mapping[str, Any], recipe: Recipe) -> Verdict:
    """Compare the hybrid with the control (or the base) on the main task, and name what became worse.

    A difference counts if the exact McNemar test is significant after Holm's correction. Without tests, the 95%
    intervals must not overlap.

    Args:
        results: content of results.json.
        recipe: the run's recipe.
    """
    arms = results["arms"]
    place = main_place(arms, recipe)
    if place is None:
        return Verdict("No accuracy was measured, so nothing can be said about the hybrid.", "unclear")
    found = {arm: entry for arm in arms if (entry := dict(entries(arms[arm])).get(place)) is not None}
    label, costs = label_of(place, found["hybrid"]), list(_losses(results, recipe, place))
    if _at_chance(place, found, recipe):
        return Verdict(_sentence([_chance_text(place, label, found, recipe), *costs]), "unclear")
    reference = "no_splice" if "no_splice" in found else "base"
    tone = _difference(results, reference, place)
    word = {"better": "better", "unclear": "not significantly better", "worse": "worse"}[tone]
    before = _before(recipe) if recipe.splice is None else "the base"
    name = "the control" if reference == "no_splice" else before
    clauses = [f"The hybrid is {word} than {name}: {label}, {_against(results, reference, place)}"]
    if reference == "no_splice" and tone == "better" and _difference(results, "base", place) != "better":
        clauses.append(f"it is not significantly better than {before} ({_percent(found['base'])})")
    if reference == "base":
        clauses.append("no control was trained, so training alone may be the reason" if tone == "better" else "")
    return Verdict(_sentence([*clauses, *costs]), tone)


def tiles_of(results: Mapping[str, Any], recipe: Recipe) -> list[Tile]:
    """Choose four numbers of the hybrid: main task, longer prompts, facts and cost, or others that were measured."""
    arms = results["arms"]
    hybrid, main = dict(entries(arms["hybrid"])), main_place(arms, recipe)
    tiles = [_task_tile(arms, main, recipe)] if main is not None else []
    sizes, trained = _kv_sizes(hybrid), _trained_pairs(recipe)
    if sizes and (main is None or main != ("kv_retrieval", str(sizes[-1]))):
        beyond = trained is not None and sizes[-1] > trained
        tiles.append(_task_tile(arms, ("kv_retrieval", str(sizes[-1])), recipe, ", beyond training" * beyond))
    tiles += [_task_tile(arms, place, recipe) for place in hybrid if _is_knowledge(place, recipe)][:1]
    tiles += _cost_tile(results)
    if "perplexity" in arms["hybrid"]:
        tiles.append(_task_tile(arms, ("perplexity",), recipe))
    used = {tile.label for tile in tiles}
    others = [place for place, entry in hybrid.items() if _is_task(place, entry)]
    tiles += [tile for place in others if (tile := _task_tile(arms, place, recipe)).label not in used]
    seconds = results.get("seconds", {}).get("train")
    took = f"{seconds / 60:.0f} min" if seconds and seconds >= 120 else f"{seconds:.0f} s" if seconds else ""
    tiles.append(Tile("training", f"{trained_steps(results, recipe):,} steps", took))
    return tiles[:4]


def _sentence(clauses: list[str]) -> str:
    text = "; ".join(clause for clause in clauses if clause)
    return f"{text[0].upper()}{text[1:]}."


def _kv_sizes(hybrid: Mapping[Place, Entry]) -> list[int]:
    """Numbers of pairs that KV-retrieval was measured at, in order."""
    return sorted(int(place[1]) for place in hybrid if place[0] == "kv_retrieval" and len(place) == 2)


def _trained_pairs(recipe: Recipe) -> int | None:
    """The largest number of pairs in training, or None."""
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    return max((source.pairs[1] for source in sources if source.task == "kv_retrieval"), default=None)


def _is_task(place: Place, entry: Entry) -> bool:
    """Whether an entry is the accuracy of a task, rather than a second score of the same prompts."""
    return "accuracy" in entry and "generated" not in place and not (place[0] == "held_out" and len(place) > 2)


def _probe_of(place: Place, recipe: Recipe) -> str:
    """Name of the probe of an entry: that of its task, which may have another `name` in the results."""
    return recipe.evaluate.probes.get(place[0], place[0])


def _is_knowledge(place: Place, recipe: Recipe) -> bool:
    probe = _probe_of(place, recipe)
    return probe in PROBES and PROBES[probe].knowledge


def _chance(place: Place, recipe: Recipe) -> float | None:
    """Accuracy of a guess, where it follows from the task."""
    if place[0] == "held_out":
        return 0.0
    return 1 / int(place[1]) if _probe_of(place, recipe) == "kv_retrieval" else None


def _at_chance(place: Place, found: Mapping[str, Entry], recipe: Recipe) -> bool:
    """Whether the interval of every model reaches down to chance."""
    chance = _chance(place, recipe)
    if chance is None:
        return False
    return all(entry["accuracy"] == 0 or (chance > 0 and entry["low"] <= chance) for entry in found.values())


def _chance_text(place: Place, label: str, found: Mapping[str, Entry], recipe: Recipe) -> str:
    if place[0] == "held_out":
        return f"No model is right on any of the {found['hybrid']['n']} held-out rows: {label}, all 0%"
    highest, chance = max(entry["accuracy"] for entry in found.values()), _chance(place, recipe) or 0
    return f"All models are at chance: {label}, at most {100 * highest:.1f}% (chance {100 * chance:.1f}%)"


def _test(results: Mapping[str, Any], reference: str, place: Place) -> Entry | None:
    """Entry of `comparisons` for the hybrid against a reference."""
    tests: Mapping[str, Any] = results.get("comparisons", {}).get("hybrid", {}).get(reference, {})
    return tests.get("/".join(place))


def _difference(results: Mapping[str, Any], reference: str, place: Place) -> Tone:
    """Whether the hybrid differs from a reference on a task."""
    test = _test(results, reference, place)
    if test is not None:
        return "unclear" if not test["significant"] else "better" if test["difference"] > 0 else "worse"
    hybrid, other = (dict(entries(results["arms"][arm])).get(place, {}) for arm in ("hybrid", reference))
    if not {"low", "high"} <= hybrid.keys() & other.keys():
        return "unclear"
    return "better" if hybrid["low"] > other["high"] else "worse" if hybrid["high"] < other["low"] else "unclear"


def _against(results: Mapping[str, Any], reference: str, place: Place) -> str:
    """Both accuracies, and their difference with its interval and p-value."""
    hybrid, other = (dict(entries(results["arms"][arm]))[place] for arm in ("hybrid", reference))
    text, test = f"{_percent(hybrid)} against {_percent(other)}", _test(results, reference, place)
    if test is None:
        return f"{text} (by 95% intervals)"
    low, high = (f"{100 * test[end]:+.1f}" for end in ("low", "high"))
    return f"{text} ({100 * test['difference']:+.1f} points [{low}, {high}], p {p_text(test['p_two_sided'])})"


def _losses(results: Mapping[str, Any], recipe: Recipe, main: Place) -> Iterator[str]:
    """State facts in any case, then other tasks on which the hybrid is significantly worse, and a risen perplexity."""
    arms, before = results["arms"], _before(recipe)
    base, hybrid = dict(entries(arms["base"])), dict(entries(arms["hybrid"]))
    for place, entry in hybrid.items():
        if place == main or place not in base or not _is_task(place, entry):
            continue
        if _difference(results, "base", place) == "worse":
            yield f"{label_of(place, entry)} fell from {_percent(base[place])} to {_percent(entry)}"
        elif _is_knowledge(place, recipe):
            yield f"{label_of(place, entry)}: {_percent(entry)} ({before} {_percent(base[place])})"
    pair = [arms[arm].get("perplexity") for arm in ("base", "hybrid")]
    if all(isinstance(value, int | float) for value in pair) and pair[1] > _RISE * pair[0]:
        yield f"perplexity of held-out sentences rose from {perplexity_text(pair[0])} to {perplexity_text(pair[1])}"


def _before(recipe: Recipe) -> str:
    """Name of the arm `base` in a sentence."""
    return BEFORE if recipe.splice is None else "base"


def _percent(entry: Entry) -> str:
    return f"{100 * entry['accuracy']:.1f}%"


def _task_tile(arms: Mapping[str, Any], place: Place, recipe: Recipe, suffix: str = "") -> Tile:
    """The hybrid's number on a task, with those of the control and the base."""
    found = {arm: dict(entries(arms[arm])).get(place) for arm in ("hybrid", "no_splice", "base") if arm in arms}

    def text(entry: Entry) -> str:
        return _percent(entry) if "accuracy" in entry else perplexity_text(entry["perplexity"])

    names = {"no_splice": "control", "base": arm_label("base", recipe)}
    notes = [f"{names[arm]} {text(entry)}" for arm, entry in found.items() if arm != "hybrid" and entry is not None]
    hybrid = found["hybrid"] or {}
    return Tile(label_of(place, hybrid) + suffix, text(hybrid), ", ".join(notes))


def _cost_tile(results: Mapping[str, Any]) -> list[Tile]:
    """Bytes of keys and values of one token, and the number of new weights. Empty if neither was counted."""
    sizes = results.get("sizes", {}).get("hybrid")
    if sizes is not None:
        share = sizes["new_parameters"] / sizes["parameters"]
        note = f"{sizes['new_parameters']:,} new weights ({100 * share:.2g}%)"
        return [Tile("KV cache per token, fp32", f"{sizes['kv_bytes_per_token']:,} B", note)]
    measured = results.get("efficiency", {}).get("arms", {}).get("hybrid", [])
    if not measured:
        return []
    cost = measured[0]
    per_token = cost["kv_bytes"] / (cost["rows"] * cost["tokens"])
    return [Tile("KV cache per token, fp32", f"{per_token:,.0f} B", "")]
