"""Summarize results.json: one sentence on the hybrid against its control, and four numbers to look at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgery.probes.registry import PROBES
from surgery.recipe import Recipe
from surgery.recipe.methods import UNRANKED
from surgery.report.results import (
    BEFORE,
    Place,
    arm_label,
    entries,
    label_of,
    p_text,
    perplexity_text,
    reference_of,
    tests_of,
    trained_pairs,
    trained_steps,
)
from surgery.report.text import duration_text
from surgery.stats import at_least, holm

Tone = Literal["better", "unclear", "worse"]
Entry = Mapping[str, Any]

_WORDS: Mapping[Tone, str] = {"better": "better", "unclear": "not significantly better", "worse": "worse"}
_RISE = 1.02  # ratio of perplexities from which the verdict mentions a rise
_FEW = 0.5  # share of rows: below it, marking answer spans or training longer is suggested


@dataclass(frozen=True)
class Verdict:
    """One sentence on a run.

    Attributes:
        sentence: the verdict with its numbers.
        tone: `better` and `worse` are significant differences to the control; everything else is `unclear`.
        advice: what to try, a line for each data set of the user with few exact answers.
    """

    sentence: str
    tone: Tone
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """One number in large type, with its label and, as `note`, what to compare it with."""

    label: str
    value: str
    note: str


def verdict_of(results: Mapping[str, Any], recipe: Recipe) -> Verdict:
    """Compare the hybrid with the control (or the base) on the main task, and name what became worse.

    The main task follows from the recipe, so its difference counts if the exact McNemar test has p < 0.05. Others count
    after Holm's correction. If the base is at chance, or training changed no answer, the accuracies are given without a
    conclusion.
    """
    place = main_place(results["arms"], recipe)
    if place is None:
        return Verdict("No accuracy was measured, so nothing can be said about the hybrid.", "unclear")
    found = {arm: entry for arm, tree in results["arms"].items() if (entry := dict(entries(tree)).get(place))}
    hybrid, label = found["hybrid"], label_of(place, found["hybrid"])
    reference = reference_of(found)
    base = "the base" if recipe.splice is not None else BEFORE
    name = "the control" if reference == "no_splice" else base
    test, to_base = (tests_of(results, other).get("/".join(place)) for other in (reference, "base"))
    doubts, losses = list(_doubts(results, recipe)), list(_losses(results, recipe, place))
    tone: Tone = "unclear"
    if all(map(_reaches_chance, found.values())):
        rows = "held-out rows" if place[0] == "held_out" else "prompts"
        lead = f"No model is right on any of the {hybrid['n']} {rows}: {label}, all 0%"
        if _chance(hybrid):
            highest = 100 * max(entry["accuracy"] for entry in found.values())
            lead = f"All models are at chance: {label}, at most {highest:.1f}% (chance {100 * _chance(hybrid):.1f}%)"
        clauses = [lead, *doubts, *losses]
    elif doubts and place[0] != "held_out":
        text = f"{label}: hybrid {_percent(hybrid)}, {name} {_percent(found[reference])}{_points(test)}"
        clauses = [*doubts, text, *losses]
    else:
        alone = test and {**test, "significant": test["p_two_sided"] < 0.05}
        tone = _tone(alone)
        select = recipe.splice.select if recipe.splice is not None else ""
        drawn = f", with heads {UNRANKED[select]}," if select in ("random", "uniform") else ""
        against = f"{_percent(hybrid)} against {_percent(found[reference])}{_points(alone)}"
        clauses = [f"The hybrid{drawn} is {_WORDS[tone]} than {name}: {label}, {against}"]
        if reference == "no_splice" and (_tone(to_base) == "worse" or tone == "better" != _tone(to_base)):
            clauses.append(f"it is {_WORDS[_tone(to_base)]} than {base} ({_percent(found['base'])})")
        if reference == "base" and tone == "better" and any(stage.trains_control for stage in recipe.train.sequence):
            clauses.append("no control was trained, so training alone may be the reason")
        if _begins_better(hybrid):
            first = _percent(hybrid["first_token"])
            clauses.append(f"its first token is right in {first} of the rows, so longer training may help")
        clauses += [*doubts, *losses]
    text = "; ".join(clauses)
    return Verdict(f"{text[0].upper()}{text[1:]}.", tone, tuple(_advice(results, recipe)))


def main_place(arms: Mapping[str, Any], recipe: Recipe) -> Place | None:
    """Choose the task that a run is judged by.

    The user's held-out rows come first, then KV-retrieval at the largest trained number of pairs, then the first other
    task of retrieval. None if no accuracy was measured.
    """
    hybrid = dict(entries(arms["hybrid"]))
    tasks = [place for place, entry in hybrid.items() if "accuracy" in entry]
    own = [place for place in tasks if place[0] == "held_out" and len(place) == 2]
    if own:
        return own[0]
    sizes, trained = _kv_sizes(hybrid), trained_pairs(recipe)
    if sizes:
        within = [size for size in sizes if trained is None or size <= trained[1]]
        return "kv_retrieval", str(max(within, default=sizes[0]))
    return next((place for place in tasks if not _is_knowledge(place, recipe)), tasks[0] if tasks else None)


def base_at_chance(arms: Mapping[str, Any], recipe: Recipe) -> tuple[Place, Entry] | None:
    """Return the base's best probe of retrieval if the base is at chance on all of them, or None.

    The base is above chance if an exact one-sided binomial test is significant for a probe, with Holm's correction over
    the probes. A probe without choices has chance 0.
    """
    probes = [
        (place, entry)
        for place, entry in entries(arms["base"])
        if _is_task(place, entry) and place[0] != "held_out" and not _is_knowledge(place, recipe)
    ]
    counts = [(round(entry["accuracy"] * entry["n"]), entry["n"], _chance(entry)) for _, entry in probes]
    if not probes or any(holm([at_least(*count) for count in counts])):
        return None
    return max(probes, key=lambda probe: probe[1]["accuracy"] - _chance(probe[1]))


def tiles_of(results: Mapping[str, Any], recipe: Recipe) -> list[Tile]:
    """Choose four numbers of the hybrid: main task, longer prompts, facts and cost, or others that were measured."""
    arms, main = results["arms"], main_place(results["arms"], recipe)
    by_arm = {arm: dict(entries(arms[arm])) for arm in ("hybrid", "no_splice", "base") if arm in arms}
    hybrid = by_arm["hybrid"]
    names = {"no_splice": "control", "base": arm_label("base", recipe)}

    def tile(place: Place, suffix: str = "") -> Tile:
        """The hybrid's number on a task, with those of the control and the base."""
        found = {arm: entry for arm, at in by_arm.items() if (entry := at.get(place)) is not None}
        texts = {arm: _percent(e) if "accuracy" in e else perplexity_text(e["perplexity"]) for arm, e in found.items()}
        notes = [f"{names[arm]} {text}" for arm, text in texts.items() if arm != "hybrid"]
        return Tile(label_of(place, hybrid[place]) + suffix, texts["hybrid"], ", ".join(notes))

    tiles = [tile(main)] if main is not None else []
    sizes, trained = _kv_sizes(hybrid), trained_pairs(recipe)
    if sizes and main != ("kv_retrieval", str(sizes[-1])):
        beyond = trained is not None and sizes[-1] > trained[1]
        tiles.append(tile(("kv_retrieval", str(sizes[-1])), ", beyond training" * beyond))
    tiles += [tile(place) for place in hybrid if place != main and _is_knowledge(place, recipe)][:1]
    if "sizes" in results:
        size = results["sizes"]["hybrid"]
        share = 100 * size["new_parameters"] / size["parameters"]
        note = f"{size['new_parameters']:,} new weights ({share:.2g}%)"
        tiles.append(Tile("KV cache per token, fp32", f"{size['kv_bytes_per_token']:,} B", note))
    if ("perplexity",) in hybrid:
        tiles.append(tile(("perplexity",)))
    used = {each.label for each in tiles}
    others = [tile(place) for place, entry in hybrid.items() if _is_task(place, entry)]
    tiles += [each for each in others if each.label not in used]
    seconds = results.get("seconds", {}).get("train")
    took = duration_text(seconds) if seconds else ""
    tiles.append(Tile("training", f"{trained_steps(results, recipe):,} steps", took))
    return tiles[:4]


def _kv_sizes(hybrid: Mapping[Place, Entry]) -> list[int]:
    """Numbers of pairs that KV-retrieval was measured at, in order."""
    return sorted(int(place[1]) for place in hybrid if place[0] == "kv_retrieval" and len(place) == 2)


def _is_task(place: Place, entry: Entry) -> bool:
    """Whether an entry is the accuracy of a task, rather than a second score of the same prompts."""
    return "accuracy" in entry and "generated" not in place and not (place[0] == "held_out" and len(place) > 2)


def _is_knowledge(place: Place, recipe: Recipe) -> bool:
    probe = recipe.evaluate.probes.get(place[0], place[0])  # a task may have another `name` in the results
    return probe in PROBES and PROBES[probe].knowledge


def _chance(entry: Entry) -> float:
    """Accuracy of a guess. 0 if the answer is generated."""
    return float(entry.get("chance", 0.0))


def _reaches_chance(entry: Entry) -> bool:
    """Whether the interval reaches down to chance, or nothing is right."""
    return bool(entry["accuracy"] == 0 or 0 < _chance(entry) >= entry["low"])


def _percent(entry: Entry) -> str:
    return f"{100 * entry['accuracy']:.1f}%"


def _tone(test: Entry | None) -> Tone:
    if test is None or not test["significant"]:
        return "unclear"
    return "better" if test["difference"] > 0 else "worse"


def _points(test: Entry | None) -> str:
    """Format a difference with its interval and p-value; empty if there is no test."""
    if test is None:
        return ""
    low, high = (f"{100 * test[end]:+.1f}" for end in ("low", "high"))
    p = test["p_two_sided"]
    corrected = ", too high with Holm's correction over all tasks" if p < 0.05 and not test["significant"] else ""
    return f" ({100 * test['difference']:+.1f} points [{low}, {high}], p {p_text(p)}{corrected})"


def _begins_better(entry: Entry) -> bool:
    """Whether less than half of the rows that begin rightly are right, by more than the intervals."""
    first = entry.get("first_token")
    return first is not None and entry["accuracy"] < _FEW * first["accuracy"] and entry["high"] < first["low"]


def _doubts(results: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """State why the run shows nothing about retrieval heads, if so."""
    tests = tests_of(results, "base").values()
    then, now = (dict(entries(results["arms"][arm])) for arm in ("base", "hybrid"))
    measured = ("accuracy", "first_token")
    kept = all(entry.get(key) == then.get(at, entry).get(key) for at, entry in now.items() for key in measured)
    if tests and kept and not any(test["difference"] or test["low"] or test["high"] for test in tests):
        same = "the hybrid is right on the same prompts as before training"
        yield f"{same}, so this run does not show what the splice can do"
    if weak := base_at_chance(results["arms"], recipe):
        base = "the base" if recipe.splice is not None else "the hybrid before fine-tuning"
        best = f"{label_of(*weak)}, {_percent(weak[1])}, chance {100 * _chance(weak[1]):.1f}%"
        chance = f"{base} is at chance on every probe of retrieval ({best}), as an untrained model is"
        yield f"{chance}: the run says nothing about retrieval heads"


def _losses(results: Mapping[str, Any], recipe: Recipe, main: Place) -> Iterator[str]:
    """State facts in any case, then tasks that fell by more than the 95% interval, and a risen perplexity."""
    before = "base" if recipe.splice is not None else BEFORE
    base, hybrid = (dict(entries(results["arms"][arm])) for arm in ("base", "hybrid"))
    for place, now in hybrid.items():
        if place == main or place not in base or not _is_task(place, now):
            continue
        then, test = base[place], tests_of(results, "base").get("/".join(place))
        fell = now["accuracy"] < then["accuracy"]
        if fell and test is not None and test["high"] < 0:
            yield f"{label_of(place, now)} fell from {_percent(then)} to {_percent(now)}{_points(test)}"
        elif _is_knowledge(place, recipe) and not (_reaches_chance(then) and _reaches_chance(now)):
            within = ", within the 95% interval" if fell else ""
            yield f"{label_of(place, now)}: {_percent(now)} ({before} {_percent(then)}{within})"
    pair = [results["arms"][arm].get("perplexity") for arm in ("base", "hybrid")]
    if all(isinstance(value, int | float) for value in pair) and pair[1] > _RISE * pair[0]:
        yield f"perplexity of held-out sentences rose from {perplexity_text(pair[0])} to {perplexity_text(pair[1])}"


def _advice(results: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """State for each data set with no right answer, or few of those that begin rightly, what to try."""
    arms, steps = results["arms"], trained_steps(results, recipe)
    longer = f"train longer (now {steps} steps)"
    if any("plateau" in stage for stage in results.get("training", {}).values()):  # more `steps` would change nothing
        longer += ": a plateau ended a stage early, so increase `plateau.patience` or `plateau.min_steps`"
    elif recipe.train.steps:
        steps = recipe.train.steps
        longer = f"train longer (now {steps} steps): repeat the command with train.steps={2 * steps}"
    for name, entry in arms["hybrid"].get("held_out", {}).items():
        if "accuracy" not in entry:
            continue
        none_right = not any(arm.get("held_out", {}).get(name, {}).get("accuracy") for arm in arms.values())
        if not (none_right or _begins_better(entry)):
            continue
        who = "no model generates any" if none_right else f"the hybrid generates {_percent(entry)}"
        text = f"{name}: {who} of the {entry['n']} held-out answers exactly."
        if first := entry.get("first_token", {}).get("accuracy"):
            text += f" The hybrid's first token is right in {100 * first:.3g}% of them."
        tips = [longer, *_span_tips(recipe, results.get("answer_spans", {}).get(name))]
        if none_right:
            tips.append(
                "check the format: compare wanted and generated text, and the space or newline before the answer"
            )
        yield f"{text} What to try: {'; '.join(tips)}."


def _span_tips(recipe: Recipe, counts: Mapping[str, int] | None) -> list[str]:
    """Suggest spans if the attention of the new heads is supervised on few rows, or on none."""
    sources = [source for stage in recipe.train.sequence for source in stage.sources if source.data is not None]
    if not any(source.weights.needs("gold_positions") for source in sources):
        return [
            "mark the place of each answer in its prompt (`answer_span`), or set `data.columns.answer_span: auto`, "
            "with `weights.attention: 1.0`"
        ]
    if counts is None:
        return []
    located = counts["found"] + counts.get("marked", 0)
    rows = located + counts["ambiguous"]  # an answer that is missing from its prompt cannot be marked
    if located >= _FEW * rows:
        return []
    found = f"found it in {located} of {rows} rows"
    return [f"mark the place of each answer (`answer_span`), as `answer_span: auto` {found}"]
