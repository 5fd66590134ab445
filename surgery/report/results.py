"""Names and cells under which a run's results are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from surgery.probes.registry import PROBES
from surgery.recipe import Recipe
from surgery.recipe.public import public_name

_ARMS = {
    "base": "base",
    "no_splice": "same training, no splice",
    "hybrid_heads_off": "this hybrid, new heads off",
    "hybrid": "**this hybrid**",
}


Place = tuple[str, ...]  # where a number is in an arm of results.json: ("kv_retrieval", "16")


def entries(tree: Mapping[str, Any], path: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Everything that an arm was measured by: a share of right answers, or a perplexity."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if "accuracy" in value or "perplexity" in value:
                yield (*path, key), value
            yield from entries(value, (*path, key))
        elif not path and key.startswith("perplexity"):
            yield (key,), {"perplexity": value}


def label_of(path: Place, entry: Mapping[str, Any]) -> str:
    """What a row of the table is called."""
    task, *rest = path
    if task == "held_out" and rest:
        name = ", ".join(rest)
        return f"{name}, held-out rows, exact match" if "accuracy" in entry else f"perplexity of {name}, held-out rows"
    name, unit = (PROBES[task].label, PROBES[task].unit) if task in PROBES else (task.replace("_", " "), "")
    parts = [f"{part} {unit}".strip() if part.isdigit() else part.replace("_", " ") for part in rest]
    return ", ".join([name, *parts])


def ordered_arms(arms: Iterable[str]) -> list[str]:
    """This hybrid comes last, arms that are not known here before the base."""
    known = list(_ARMS)
    return sorted(arms, key=lambda arm: (known.index(arm) if arm in known else -1, arm))


def arm_name(arm: str, recipe: Recipe) -> str:
    """What a column of the table is called, in Markdown."""
    if recipe.splice is None and arm == "base":
        return f"{public_name(recipe.base.model)}, before"
    if recipe.splice is None and arm == "no_splice" and recipe.control is not None:
        return f"{public_name(recipe.control.model)}, same training"
    return _ARMS.get(arm, arm.replace("_", " "))


def cell_of(entry: Mapping[str, Any] | None) -> str:
    """A share with its interval, or a perplexity."""
    if entry is None:
        return "not measured"
    if "accuracy" not in entry:
        return perplexity_text(entry["perplexity"])
    interval = f" [{entry['low']:.3f}, {entry['high']:.3f}]" if "low" in entry else ""
    return f"{entry['accuracy']:.3f}{interval}"


def perplexity_text(value: float) -> str:
    """Three decimals, as far as anyone reads them."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.1e}"


def limits_of(recipe: Recipe) -> tuple[str, ...]:
    """What was trained on, and what a user has to know, a sentence or two each."""
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    tasks = sorted({source.task for source in sources if source.task})
    data = [f"generated text ({', '.join(tasks)})"] * bool(tasks) + own_data(recipe)
    trained = "Trained further" if recipe.splice is None else "Trained"
    return (
        f"{trained} for {recipe.train.num_all_steps} steps on {' and '.join(data)}, and on nothing else.",
        "The probes are generated: short words and invented facts. They show retrieval, not usefulness.",
        "Keys and values are kept for the spliced layers: memory grows with length there, unlike in the base.",
        "Assisted decoding refuses stateful models. vLLM and SGLang do not load head-level hybrids.",
        "Needs transformers 5.21 or newer: older ones decode such layers wrongly.",
    )


def own_data(recipe: Recipe) -> list[str]:
    """The public names of the user's own data."""
    return sorted({public_name(data.path) for data in recipe.train.own_data})
