"""One page about a run: what was done, what it changed, what it cost. Owns: `report.html` and its words.

Must never know: models, torch, how a number was measured. The page is one file without scripts that asks the network
for nothing; figures lie inside it as SVG. Every number in it comes from the run's own results.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from surgery.files.atomic import write_text
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.public import public_name, public_recipe
from surgery.report.results import arm_name, cell_of, entries, label_of, limits_of, ordered_arms, perplexity_text
from surgery.types import HeadSet, Plan

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_FIGURES = {
    "accuracy": ("evaluate/accuracy_by_pairs", "Accuracy on KV-retrieval by number of pairs, every arm"),
    "where": ("locate/head_maps", "What every head is worth, by ablation, by role and by a perfect read"),
    "training": ("training/training", "Losses of the hybrid by step"),
    "control": ("no_splice_training/no_splice_training", "Losses of the control by step"),
    "efficiency": ("evaluate/efficiency", "Speed and memory of every arm by length of the prompt"),
}


@dataclass(frozen=True)
class Facts:
    """What a report is made from.

    Attributes:
        heads: None where it is not known how the heads were chosen.
        results: as in `results.json`.
        figures: the run's folder of figures.
    """

    recipe: Recipe
    plan: Plan
    heads: HeadSet | None
    results: Mapping[str, Any]
    figures: Path


def write_report(facts: Facts, path: Path) -> Path:
    """Writes the page to `path` and returns it. Same values, same bytes. What was not measured is left out."""
    recipe = facts.recipe
    parts = [
        f"<header><h1>{_text(recipe.name)}</h1>{_story(facts)}</header>",
        _section("Retrieval", _figure(facts, "accuracy"), _contrasts(facts), _gap_closed(facts)),
        _section("All measurements", _table(facts)),
        _section("Where, and why there", _where(facts), _figure(facts, "where")),
        _section("What the new heads read", *(_image(p, _reading_of(p)) for p in _attention(facts))),
        _section("Training", _figure(facts, "training"), _figure(facts, "control")),
        _section("What it costs to run", _figure(facts, "efficiency"), _costs(facts)),
        _section("How it was measured", _measured(facts)),
        _section("Limits", *(f"<p>{_text(limit)}</p>" for limit in limits_of(recipe))),
        _section("The recipe", f"<pre>{_text(to_yaml(public_recipe(recipe)))}</pre>"),
    ]
    title = f"{recipe.name}: what was spliced, and what it changed"
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
    )
    write_text(path, head + "\n".join(part for part in parts if part) + "\n</main>\n</body>\n</html>\n")
    return path


def _style() -> str:
    return files("surgery.report").joinpath("run_page.css").read_text(encoding="utf-8")


def _text(words: object) -> str:
    return html.escape(str(words))


def _section(title: str, *parts: str) -> str:
    """Nothing where there is nothing to say."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{_text(title)}</h2>\n{inside}\n</section>" if inside else ""


def _figure(facts: Facts, name: str) -> str:
    stem, what = _FIGURES[name]
    return _image(facts.figures / f"{stem}.svg", what)


def _image(path: Path, what: str) -> str:
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{_text(what)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _attention(facts: Facts) -> list[Path]:
    return sorted((facts.figures / "evaluate").glob("attention_*.svg"))


def _reading_of(path: Path) -> str:
    return f"What {path.stem.removeprefix('attention_')} reads of one prompt, before training and after"


def _percent(entry: Mapping[str, float]) -> str:
    return f"{100 * entry['accuracy']:.1f}% [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]"


def _story(facts: Facts) -> str:
    """What was done and what came of it: three sentences."""
    return f"<p>{_done(facts)} {_trained(facts)} {_outcome(facts)}</p>"


def _done(facts: Facts) -> str:
    recipe, plan = facts.recipe, facts.plan
    base, names = _text(public_name(recipe.base.model)), ", ".join(map(str, plan.heads))
    count = len(plan.heads)
    attention = f"{count} softmax-attention head{'s' if count > 1 else ''}"
    if recipe.splice is None:
        return f"{base}, a hybrid with {attention} ({names}), was trained further."
    if recipe.splice.unit == "layer":
        layers = ", ".join(str(graft.site.layer) for graft in plan.grafts)
        return f"In {base} the mixers of layers {layers} were replaced by a Transformer's attention."
    place = "in the place of" if recipe.splice.mode == "replace" else "beside"
    how = f"chosen by <code>{_text(recipe.splice.select)}</code>"
    if facts.heads is not None and facts.heads.clean:
        how += f" on {recipe.locate.examples} prompts of {recipe.locate.pairs} pairs"
    return f"{base} was given {attention} {place} {names}, {how}."


def _trained(facts: Facts) -> str:
    train = facts.recipe.train
    what = {stage.trains for stage in train.sequence}
    which = " then ".join(dict.fromkeys(stage.trains.replace("_", " ") for stage in train.sequence))
    words = {"all": "all weights", "new heads": "the new heads alone", "lora": "the new heads and adapters"}
    which = words.get(which, which) if len(what) == 1 else which
    text = f"Training took {train.num_all_steps} steps of {_text(which)}"
    seconds = facts.results.get("seconds", {}).get("train")
    text += f" ({_duration(seconds)})" if seconds else ""
    return text + ("; the control went through the same steps." if "no_splice" in facts.results["arms"] else ".")


def _outcome(facts: Facts) -> str:
    """The largest dictionary that was trained on, or that was asked; then what was to be kept."""
    arms, recipe = facts.results["arms"], facts.recipe
    own = next(iter(arms["hybrid"].get("held_out", {})), None)
    where, path = _largest(arms, recipe)
    if own is not None:
        where, path = f"On held-out rows of {_text(own)}", ("held_out", own)
    found = {arm: dict(entries(summary)).get(path) for arm, summary in arms.items()}
    said = [f"{arm_name(arm, recipe)} {_score(found[arm])}" for arm in ordered_arms(arms) if found[arm]]
    return f"{where}: {_text(_plain('; '.join(said)))}{_kept(arms['base'], arms['hybrid'])}."


def _kept(base: Mapping[str, Any], hybrid: Mapping[str, Any]) -> str:
    """What training did to facts and sentences that it did not show."""
    if "closed_book" not in hybrid or "perplexity" not in hybrid:
        return ""
    facts = [f"{100 * arm['closed_book']['accuracy']:.1f}%" for arm in (base, hybrid)]
    texts = [perplexity_text(arm["perplexity"]) for arm in (base, hybrid)]
    return f"; held-out facts went from {facts[0]} to {facts[1]}, perplexity from {texts[0]} to {texts[1]}"


def _largest(arms: Mapping[str, Any], recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """Of the sizes that were asked, the largest that training went up to."""
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    most = max((s.pairs[1] for s in sources if s.task == "kv_retrieval"), default=None)
    sizes = sorted(map(int, arms["hybrid"]["kv_retrieval"]))
    fitting = [size for size in sizes if most is None or size <= most] or sizes[:1]
    return f"At {fitting[-1]} pairs", ("kv_retrieval", str(fitting[-1]))


def _score(entry: Mapping[str, float] | None) -> str:
    if entry is None:
        return ""
    return _percent(entry) if "accuracy" in entry else f"perplexity {perplexity_text(entry['perplexity'])}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _contrasts(facts: Facts) -> str:
    """The hybrid against each of the others, prompt by prompt, on the retrieval that everything hangs on."""
    against = facts.results.get("comparisons", {}).get("hybrid", {})
    tasks = [task for task in next(iter(against.values()), {}) if task.startswith(("kv_retrieval/", "held_out/"))]
    rows = []
    for task in tasks:
        path = tuple(task.split("/", 1 if task.startswith("held_out") else -1))
        rows.append((label_of(path, {"accuracy": 0}), *(_contrast(found[task]) for found in against.values())))
    if not rows:
        return ""
    note = (
        "<p>This hybrid minus the other, in points, on the same prompts: bootstrap intervals over prompts, exact "
        "two-sided McNemar tests; * stands at 0.05 with Holm's correction over all tasks and arms.</p>"
    )
    return note + _rows(("", *(f"against {_plain(arm_name(than, facts.recipe))}" for than in against)), rows)


def _contrast(found: Mapping[str, Any]) -> str:
    interval = f"{100 * found['difference']:+.1f} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    return f"{interval}, p {found['p_two_sided']:.2g}{' *' if found['significant'] else ''}"


def _plain(markdown: str) -> str:
    return markdown.replace("**", "")


def _gap_closed(facts: Facts) -> str:
    """The part of the distance from the control to the teacher, where a teacher was asked too."""
    rows = []
    for task, found in facts.results.get("gap_closed", {}).items():
        if task.startswith("kv_retrieval/"):
            shown = f"not said: {found.get('reason', '')}"
            if found["value"] is not None:
                shown = f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
            rows.append((label_of(tuple(task.split("/")), {"accuracy": 0}), shown))
    if not rows:
        return ""
    note = "<p>Gap closed: (hybrid - control) / (teacher - control), in accuracy; 0 is the control, 1 the teacher.</p>"
    return note + _rows(("task", "gap closed"), rows)


def _table(facts: Facts) -> str:
    """Every arm on every task."""
    recipe, results = facts.recipe, facts.results
    arms = {name: dict(entries(results["arms"][name])) for name in ordered_arms(results["arms"])}
    header = ["", *(_plain(arm_name(name, recipe)) for name in arms), "prompts"]
    rows = []
    for path, entry in arms["base"].items():
        cells = [_plain(cell_of(arm.get(path))) for arm in arms.values()]
        rows.append((label_of(path, entry), *cells, str(entry.get("n", ""))))
    return _rows(header, rows)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{_text(first)}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in rest) + "</tr>\n"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def _where(facts: Facts) -> str:
    """Every spliced head, and how it ranks among all."""
    rows = []
    scored = {s.head: s for s in facts.heads.heads} if facts.heads is not None else {}
    chosen = {s.head: s for s in facts.heads.chosen} if facts.heads is not None else {}
    for graft in facts.plan.grafts:
        for head in facts.plan.heads:
            if head.layer != graft.site.layer:
                continue
            one = scored.get(head)
            measured = {**(one.scores if one else {}), **(chosen[head].scores if head in chosen else {})}
            best = [f"{k.replace('_', ' ')} {v.value:+.2f} [{v.low:+.2f}, {v.high:+.2f}]" for k, v in measured.items()]
            shown = [text for text in best if "accuracy" not in text]
            role = one.role if one is not None else "not known"
            rows.append((str(head), graft.mode, graft.init, role, "; ".join(shown)))
    return _rows(("head", "mode", "init", "role", "scores, margins in logits, 95% intervals"), rows) if rows else ""


def _costs(facts: Facts) -> str:
    """Ratios to the base, at the longest prompt of every number of prompts at once."""
    found = facts.results.get("efficiency")
    if not found:
        return ""
    base, *others = found["arms"]
    rows = []
    for i, cost in enumerate(found["arms"][base]):
        for name in others:
            mine = found["arms"][name][i]
            ratios = [
                f"{cost['time_to_first_token'] / mine['time_to_first_token']:.2f}x",
                f"{mine['decode_tokens_per_second'] / cost['decode_tokens_per_second']:.2f}x",
                f"{(mine['state_bytes'] + mine['kv_bytes']) / (cost['state_bytes'] + cost['kv_bytes']):.2f}x",
                f"{mine['peak_bytes'] / cost['peak_bytes']:.2f}x",
            ]
            size = f"{int(cost['rows'])} x {int(cost['tokens'])} tokens"
            rows.append((size, _plain(arm_name(name, facts.recipe)), *ratios, f"{mine['spread']:.0%}"))
    header = ("prompts", "arm", "reading speed", "writing speed", "states, keys, values", "peak memory", "spread")
    note = "<p>Against the base, timed in turn. A ratio of speeds within the spread of 1 is no difference.</p>"
    return note + _rows(header, rows)


def _measured(facts: Facts) -> str:
    results = facts.results
    seconds = [f"{name} {_duration(s)}" for name, s in results.get("seconds", {}).items() if s]
    versions = ", ".join(f"{k} {v}" for k, v in results.get("versions", {}).items())
    lines = [
        f"Seed {results.get('seed', facts.recipe.seed)}. Every arm answers the same prompts, none of them of the "
        "training split. Intervals are Wilson's, 95%.",
        f"Time: {', '.join(seconds)}." if seconds else "",
        f"Versions: {versions}." if versions else "",
    ]
    return "".join(f"<p>{_text(line)}</p>" for line in lines if line)
