"""Tables and figures of the finished arms, and the page that holds them.

The page holds a table between `<!-- begin NAME -->` and `<!-- end NAME -->`. The rest of the page is written by hand
and does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from bench.common import markdown_table
from bench.studies.site_selection.arms import LAYER_METHODS, SHIPPED, TRANSFORMER, layer_chosen, layer_of
from bench.studies.site_selection.figures import bars_by_arm, predicted_and_reached
from bench.studies.site_selection.rows import BASES, CONTROL, METHODS, PAIRS, main_rows, tests_against, variant_rows
from bench.studies.site_selection.statistics import (
    BySeed,
    Correlation,
    Paired,
    Results,
    Site,
    accuracy,
    correlation,
    gap_closed,
    mean_at,
    mean_of,
    of_seed,
    sites,
    spread,
)
from surgery.errors import RunError
from surgery.files.atomic import write_text
from surgery.report.figures.curves import accuracy_by_pairs
from surgery.types import Interval

ENOUGH = 12  # sites for a correlation
PREDICTORS = ("sharpen", "ablation", "attribution", "query")
_BLOCK = re.compile(r"(<!-- begin ([\w/-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


def tables(results: Results, settings: Mapping[str, str]) -> dict[str, str]:
    """Make every table: name -> Markdown. Tables of one base are named `BASE/TABLE`.

    Args:
        settings: budget and versions of the finished arms, by name.
    """
    found = {"settings": markdown_table(["setting", "value"], list(settings.items()))}
    for base in BASES:
        if not results.seeds(base):
            continue
        found[f"{base}/chosen"] = _chosen(results, base)
        if not results.arm(base, "no-splice"):
            continue
        against = results.method(base, "sharpen")
        found[f"{base}/comparison"] = _arms(main_rows(results, base), against)
        if variants := variant_rows(results, base):
            own = {CONTROL: results.arm(base, "no-splice"), METHODS["sharpen"]: against}
            found[f"{base}/variants"] = _arms({**own, **variants}, against)
        trained = sites(results, base, PAIRS)
        if len(trained) >= ENOUGH:
            found[f"{base}/correlations"] = _correlations(trained)
            found[f"{base}/best-site"] = _best_site(trained)
            winning = layer_of(results.choices[base, results.seeds(base)[0]]["methods"]["sharpen"][0])
            found |= {f"{base}/{name}": table for name, table in _layers(trained, winning).items()}
    if results.arm(TRANSFORMER, "no-splice") and results.arm(SHIPPED, "no-splice"):
        found["gap"] = _gap(results)
    return {name: table + "\n" for name, table in found.items()}


def fill(page: Path, found: Mapping[str, str]) -> None:
    """Replace the tables on a page; write a page of all tables if there is none.

    Raises:
        RunError: the page has a place for a table without results.
    """
    if not page.exists():
        blocks = (f"<!-- begin {name} -->\n{table}<!-- end {name} -->\n" for name, table in found.items())
        write_text(page, "# Tables\n\n" + "\n".join(blocks))
        return

    def replaced(block: re.Match[str]) -> str:
        if block[2] not in found:
            raise RunError("page", str(page), f"No results for the table {block[2]!r}. Finish its arms, or remove it.")
        return block[1] + found[block[2]] + block[4]

    write_text(page, _BLOCK.sub(replaced, page.read_text(encoding="utf-8")))


def tables_on(page: Path) -> dict[str, str]:
    """The tables that a page holds, by name."""
    return {block[2]: block[3] for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))}


def draw(results: Results, folder: Path) -> None:
    """Draw the figures of every base with a control into a folder of its own."""
    for base, title in BASES.items():
        control = results.arm(base, "no-splice")
        if not control:
            continue
        arms = {CONTROL: control, **main_rows(results, base)}
        lines = {"no_splice" if name == CONTROL else name: _curve(arm) for name, arm in arms.items()}
        trained = next(iter(control.values()))["budget"]["pairs"]
        accuracy_by_pairs(lines, folder / base, tuple(trained), f"Accuracy by choice of site: {title}")
        arms |= variant_rows(results, base)
        bars = {name: (_known(arm, PAIRS), [of_seed(r, PAIRS) for r in arm.values()]) for name, arm in arms.items()}
        note = f"KV-retrieval with {PAIRS} pairs; line: 95% interval over all seeds; dots: seeds; dotted: no splice."
        bars_by_arm(bars, folder / base, f"All arms at {PAIRS} pairs: {title}", note, CONTROL)
        trained_sites = sites(results, base, PAIRS)
        if len(trained_sites) >= ENOUGH:
            title = f"Predicted and measured gain of {len(trained_sites)} heads: {title}"
            note = f"Each head is the only site of an arm; gain over no splice at {PAIRS} pairs, mean over seeds."
            predicted_and_reached(trained_sites, _by_predictor(trained_sites), folder / base, title, note)


def _chosen(results: Results, base: str) -> str:
    seeds = results.seeds(base)
    rows = [[label, *(_site(results, base, method, s) for s in seeds)] for method, label in METHODS.items()]
    pairs = results.choices[base, seeds[0]]["pairs"]
    clean = [f"{results.choices[base, s]['clean']:.2f}" for s in seeds]
    rows.append([f"accuracy of the base at {pairs} pairs", *clean])
    return markdown_table(["method", *(f"seed {s}" for s in seeds)], rows)


def _site(results: Results, base: str, method: str, seed: int) -> str:
    """The chosen head with its score in logits; the chosen layer with its KL in nats."""
    choices = results.choices[base, seed]
    if method == "divergence":
        layer = choices["layers"][method]
        return f"layer {layer} ({choices['divergence'][layer]:.2f})"
    if method in LAYER_METHODS:
        return f"layer {layer_chosen(choices, method)}"
    head = choices["methods"][method][0]
    score = choices["scores"][head].get(method)
    return head if score is None else f"{head} ({score:+.2f})"


def _arms(arms: Mapping[str, BySeed], against: BySeed) -> str:
    """Accuracy by pairs, facts and perplexity, and the paired test against the oracle-read head."""
    tests, significant = tests_against(arms, against, PAIRS)
    pairs = sorted({int(p) for arm in arms.values() for r in arm.values() for p in r["summary"]["kv_retrieval"]})
    rows = []
    for label, arm in arms.items():
        facts = mean_of(arm, lambda result: result["summary"]["closed_book"]["accuracy"])
        perplexity = mean_of(arm, lambda result: result["summary"]["perplexity"])
        trained = next(iter(arm.values()))["parameters"]["trained"]
        if label in tests:
            test = _test(tests[label], significant[label])
        else:
            test = "" if label == METHODS["sharpen"] else "the same arm"
        cells = [*(_cell(arm, p) for p in pairs), f"{facts:.3f}", f"{perplexity:.3f}", f"{trained:,}"]
        rows.append([label, *cells, test, str(len(arm))])
    header = ["arm", *(f"{p} pairs" for p in pairs), "facts", "perplexity", "trained weights"]
    return markdown_table([*header, f"against {METHODS['sharpen']}, {PAIRS} pairs", "seeds"], rows)


def _cell(arm: BySeed, pairs: int) -> str:
    interval = _known(arm, pairs)
    value = f"**{interval.value:.3f}**" if pairs == PAIRS else f"{interval.value:.3f}"
    return f"{value} [{interval.low:.2f}, {interval.high:.2f}]"


def _test(test: Paired, significant: bool) -> str:
    return f"{100 * test.difference:+.1f} points, p = {test.p:.1g}{' *' if significant else ''}"


def _known(arm: BySeed, pairs: int) -> Interval:
    interval = accuracy(arm, pairs)
    assert interval is not None, "an arm without a seed"
    return interval


def _curve(arm: BySeed) -> dict[str, dict[str, float]]:
    """Accuracy by number of pairs, as `accuracy_by_pairs` draws it."""
    points = {pairs: _known(arm, int(pairs)) for pairs in next(iter(arm.values()))["summary"]["kv_retrieval"]}
    return {pairs: {"accuracy": i.value, "low": i.low, "high": i.high, "n": i.n} for pairs, i in points.items()}


def _by_predictor(trained: list[Site]) -> dict[str, Correlation | None]:
    gains = [site.gain for site in trained]
    return {name: correlation([site.predicted[name] for site in trained], gains) for name in PREDICTORS}


def _correlations(trained: list[Site]) -> str:
    rows = []
    for name, found in _by_predictor(trained).items():
        intervals = (found.spearman, found.pearson) if found else ()
        rows.append([name, *(f"{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for x in intervals)])
    return markdown_table(["predictor", "Spearman", "Pearson"], rows)


def _best_site(trained: list[Site]) -> str:
    """The site with the largest gain, and its rank by each prediction made before training."""
    best = max(trained, key=lambda site: site.gain)
    names = ("sharpen", "ablation", "attribution")
    ranks = [str(1 + sum(site.predicted[name] > best.predicted[name] for site in trained)) for name in names]
    header = ["best site", "gain, points", *(f"rank by {name}" for name in names), "of"]
    return markdown_table(header, [[best.head, f"{100 * best.gain:+.1f}", *ranks, str(len(trained))]])


def _layers(trained: list[Site], winning: int) -> dict[str, str]:
    """Tables of the variation of the gain between heads of one layer, between layers, and between seeds."""
    found = spread(trained, winning)
    if found is None:
        return {}
    counts = {layer: sum(layer_of(site.head) == layer for site in trained) for layer in found.layers}
    means = [[str(layer), str(counts[layer]), f"{100 * gain:+.1f}"] for layer, gain in found.layers.items()]
    rows = [[f"heads of layer {winning}", found.within], ["means of the layers", found.between]]
    rows += [["the same site in different seeds", found.noise]] if math.isfinite(found.noise) else []
    deviations = [[str(name), f"{100 * float(value):.1f}"] for name, value in rows]
    return {
        "layers": markdown_table(["layer", "heads trained", "mean gain, points"], means),
        "spread": markdown_table(["standard deviation of the gain between", "points"], deviations),
    }


def _gap(results: Results) -> str:
    """Share of the difference between the control and a Transformer of the same size that each arm closes."""
    other, control = results.arm(TRANSFORMER, "no-splice"), results.arm(SHIPPED, "no-splice")
    arms = {METHODS["sharpen"]: results.method(SHIPPED, "sharpen"), **variant_rows(results, SHIPPED)}
    rows = [[CONTROL, *_means(control), "0", "0"], ["Transformer", *_means(other), "1", "1"]]
    for label, arm in arms.items():
        shares = [gap_closed(mean_at(arm, p), mean_at(control, p), mean_at(other, p)) for p in (16, PAIRS)]
        rows.append([label, *_means(arm), *(f"{share:.2f}" for share in shares)])
    header = ["arm", "16 pairs", f"{PAIRS} pairs", "gap closed, 16", f"gap closed, {PAIRS}"]
    return markdown_table(header, rows)


def _means(arm: BySeed) -> list[str]:
    return [f"{mean_at(arm, pairs):.3f}" for pairs in (16, PAIRS)]
