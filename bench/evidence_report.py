"""Writes docs/EVIDENCE.md and docs/evidence/ from the arms that are there. Owns: tables, and what is concluded when.

Must never know: models, training. Every sentence with a number, and every verdict, is made from the results.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.evidence_arms import AGAIN, LAYER_METHODS, SECOND, SHIPPED, TRANSFORMER, layer_chosen, layer_of
from bench.evidence_figures import bars_by_arm, predicted_and_reached
from bench.evidence_findings import (
    NAMES,
    PAIRS,
    best_site,
    count_seeds,
    finding,
    layer_or_head,
    main_rows,
    tests_against,
    variant_rows,
)
from bench.evidence_statistics import (
    BySeed,
    Correlation,
    Paired,
    Results,
    accuracy,
    correlation,
    gap_closed,
    mean_at,
    mean_of,
    of_seed,
    sites,
)
from bench.evidence_text import HEAD, LIMITS, METHOD_NAMES, SECTIONS, SHORT_NAMES
from surgery.files.atomic import write_text
from surgery.report.figures.curves import accuracy_by_pairs
from surgery.types import Interval

ENOUGH = 12  # sites for a correlation


@dataclass(frozen=True)
class Progress:
    """How far the experiment is: arms that are finished, and what there is to know of them, by name."""

    done: int
    facts: Mapping[str, str]


def write_report(results: Results, progress: Progress, page: Path, figures: Path) -> None:
    """Writes the page and its figures.

    Args:
        page: docs/EVIDENCE.md. figures: a folder beside it.
    """
    parts = [HEAD, *(_filled(finding(results, base)) for base in _bases(results)), _how(progress)]
    parts += [SECTIONS[name].strip() for name in ("comparison", "variants", "sites")]
    for base in _bases(results):
        if results.seeds(base):
            parts += _base_section(results, base, figures, page.parent)
    parts += [_transformer(results), LIMITS]
    write_text(page, "\n\n".join(part.strip() for part in parts if part) + "\n")


def _bases(results: Results) -> list[str]:
    """Those with results, and the first two in any case: what is not measured yet is said."""
    return [SHIPPED, SECOND, *([AGAIN] if results.seeds(AGAIN) else [])]


def _how(progress: Progress) -> str:
    lines = [_filled(f"- {name}: {value}", "  ") for name, value in progress.facts.items()]
    return "\n".join(
        [SECTIONS["how"], "", f"{progress.done} arms are finished; this page holds what they say.", "", *lines]
    )


def _base_section(results: Results, base: str, figures: Path, docs: Path) -> list[str]:
    folder = figures / base
    parts = [f"## {NAMES[base].capitalize()}", SECTIONS[base], _chosen_table(results, base)]
    if not results.arm(base, "no-splice"):
        return parts
    parts += [_main_table(results, base), _figures(results, base, folder, docs)]
    parts += [_variant_table(results, base), _sites_text(results, base, folder, docs)]
    return parts


def _chosen_table(results: Results, base: str) -> str:
    seeds = results.seeds(base)
    rows = [[name, *(_site(results, base, method, s) for s in seeds)] for method, name in METHOD_NAMES.items()]
    clean = [f"{results.choices[base, s]['clean']:.2f}" for s in seeds]
    pairs = results.choices[base, seeds[0]]["pairs"]
    rows.append([f"accuracy of the base there ({pairs} pairs)", *clean])
    return "### What each method chose\n\n" + _table(["method", *(f"seed {s}" for s in seeds)], rows)


def _site(results: Results, base: str, method: str, seed: int) -> str:
    """The head with the score that chose it, in logits; the layer with its KL, in nats."""
    choices, name = results.choices[base, seed], results.chosen(base, method, seed)
    if method == "divergence":
        layer = choices["layers"][method]
        return f"layer {layer} ({choices['divergence'][layer]:.2f})"
    if method in LAYER_METHODS:
        return f"layer {layer_chosen(choices, method)}"
    head = name.removeprefix("site-")
    score = choices["scores"][head].get(method)
    return head if score is None else f"{head} ({score:+.2f})"


def _main_table(results: Results, base: str) -> str:
    label = METHOD_NAMES["sharpen"]
    return "### The comparison\n\n" + _arms_table(main_rows(results, base), results.method(base, "sharpen"), label)


def _variant_table(results: Results, base: str) -> str:
    rows = variant_rows(results, base)
    if not rows:
        return ""
    sharpen = results.method(base, "sharpen")
    label = METHOD_NAMES["sharpen"]
    rows = {"no splice": results.arm(base, "no-splice"), label: sharpen, **rows}
    return "### What is put there\n\n" + _arms_table(rows, sharpen, label)


def _arms_table(arms: Mapping[str, BySeed], against: BySeed, label: str) -> str:
    """Accuracies by pairs, what is to stay, and the paired test against one arm."""
    there = {name: arm for name, arm in arms.items() if arm}
    tests, stands = tests_against(there, against, PAIRS)
    pairs = sorted({int(p) for arm in there.values() for r in arm.values() for p in r["summary"]["kv_retrieval"]})
    rows = []
    for name, arm in there.items():
        cells = [_cell(arm, p) for p in pairs]
        facts = f"{mean_of(arm, lambda r: r['summary']['closed_book']['accuracy']):.3f}"
        perplexity = f"{mean_of(arm, lambda r: r['summary']['perplexity']):.3f}"
        trained = f"{next(iter(arm.values()))['parameters']['trained']:,}"
        test = _test(tests[name], stands[name]) if name in tests else "" if name == label else "the same arm"
        rows.append([name, *cells, facts, perplexity, trained, test, count_seeds(arm)])
    header = ["arm", *(f"{p} pairs" for p in pairs), "facts", "perplexity", "trained weights"]
    return _table([*header, f"against {label}, {PAIRS} pairs", "seeds"], rows)


def _cell(arm: BySeed, pairs: int) -> str:
    found = _known(arm, pairs)
    middle = f"**{found.value:.3f}**" if pairs == PAIRS else f"{found.value:.3f}"
    return f"{middle} [{found.low:.2f}, {found.high:.2f}]"


def _test(test: Paired, stands: bool) -> str:
    mark = " *" if stands else ""
    return f"{100 * test.difference:+.1f} points, p = {test.p:.1g}{mark}"


def _figures(results: Results, base: str, folder: Path, docs: Path) -> str:
    control, short = results.arm(base, "no-splice"), {"no_splice": results.arm(base, "no-splice")}
    short |= {name: results.method(base, method) for method, name in SHORT_NAMES.items()}
    lines = {name: {str(p): _point(arm, p) for p in _pairs_of(arm)} for name, arm in short.items() if arm}
    trained = next(iter(control.values()))["budget"]["pairs"]
    accuracy_by_pairs(lines, folder, tuple(trained), f"Accuracy by choice of site: {NAMES[base]}")
    arms = main_rows(results, base) | variant_rows(results, base)
    bars = {name: (_known(arm, PAIRS), [of_seed(r, PAIRS) for r in arm.values()]) for name, arm in arms.items() if arm}
    note = f"KV-retrieval with {PAIRS} pairs; line: 95% interval over all seeds; dots: seeds; dotted: no splice."
    bars_by_arm(bars, folder, f"Every arm at {PAIRS} pairs: {NAMES[base]}", note, "no splice")
    place = folder.relative_to(docs).as_posix()
    return f"![Accuracy by pairs]({place}/accuracy_by_pairs.png)\n\n![Every arm]({place}/arms.png)"


def _known(arm: BySeed, pairs: int) -> Interval:
    found = accuracy(arm, pairs)
    assert found is not None, "an arm without a seed"
    return found


def _point(arm: BySeed, pairs: int) -> dict[str, float]:
    found = _known(arm, pairs)
    return {"accuracy": found.value, "low": found.low, "high": found.high, "n": found.n}


def _pairs_of(arm: BySeed) -> list[int]:
    return sorted(int(p) for p in next(iter(arm.values()))["summary"]["kv_retrieval"])


def _sites_text(results: Results, base: str, folder: Path, docs: Path) -> str:
    """The correlation over sites, and whether it is the layer or the head."""
    found = sites(results, base, PAIRS)
    if len(found) < ENOUGH:
        said = f"{len(found)} single heads are trained so far; with {ENOUGH} this is answered."
        return f"### Is the gain foreseen?\n\n{said}"
    predictors = ("sharpen", "ablation", "attribution", "query")
    reached = [site.gain for site in found]
    by = {name: correlation([site.predicted[name] for site in found], reached) for name in predictors}
    title = f"Predicted and reached gain of {len(found)} heads: {NAMES[base]}"
    note = f"Each trained as a site of its own; gain over no splice at {PAIRS} pairs, mean of the seeds there are."
    predicted_and_reached(found, by, folder, title, note)
    rows = [[name, *_correlations(by[name])] for name in predictors]
    table = _table(["predictor", "Spearman", "Pearson"], rows)
    text = (
        f"### Is the gain foreseen?\n\n{table}\n\n"
        f"![Predicted and reached]({folder.relative_to(docs).as_posix()}/sites.png)"
    )
    winning = layer_of(results.choices[base, results.seeds(base)[0]]["methods"]["sharpen"][0])
    return "\n\n".join([text, _filled(best_site(found)), _filled(layer_or_head(found, winning))])


def _correlations(found: Correlation | None) -> list[str]:
    if found is None:
        return ["", ""]
    return [f"{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for x in (found.spearman, found.pearson)]


def _transformer(results: Results) -> str:
    """How much of the distance to a Transformer of the same size each arm closes."""
    other = results.arm(TRANSFORMER, "no-splice")
    control = results.arm(SHIPPED, "no-splice")
    if not other or not control:
        return f"## Gap closed\n\n{SECTIONS['gap'].strip()}\n\nThe Transformer is not trained yet."
    arms = {"sharpen's head": results.method(SHIPPED, "sharpen")}
    arms |= variant_rows(results, SHIPPED)
    rows = [["no splice", *_values(control), "0", "0"], ["Transformer", *_values(other), "1", "1"]]
    for name, arm in arms.items():
        shares = [gap_closed(mean_at(arm, p), mean_at(control, p), mean_at(other, p)) for p in (16, PAIRS)]
        rows.append([name, *_values(arm), *(f"{share:.2f}" for share in shares)])
    header = ["arm", "16 pairs", f"{PAIRS} pairs", "gap closed, 16", f"gap closed, {PAIRS}"]
    return f"## Gap closed\n\n{SECTIONS['gap'].strip()}\n\n{_table(header, rows)}"


def _values(arm: BySeed) -> list[str]:
    return [f"{mean_at(arm, pairs):.3f}" for pairs in (16, PAIRS)]


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
