"""What follows from the results, in words. Owns: which sentence is said when. Must never know: files, figures.

Nothing is said that a test or a number does not decide: the words hold whatever comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.evidence_arms import AGAIN, SECOND, SHIPPED, layer_of
from bench.evidence_statistics import BySeed, Paired, Results, Site, accuracy, family, paired, spread
from bench.evidence_text import METHOD_NAMES, VARIANTS

PAIRS = 32  # what arms are compared at
NAMES = {SHIPPED: "the shipped base", SECOND: "the second base", AGAIN: "the second base, pretrained again"}


def main_rows(results: Results, base: str) -> dict[str, BySeed]:
    """No splice and what each method chose, as far as there is any of it."""
    rows = {"no splice": results.arm(base, "no-splice")}
    rows |= {name: results.method(base, method) for method, name in METHOD_NAMES.items()}
    return {name: arm for name, arm in rows.items() if arm}


def variant_rows(results: Results, base: str) -> dict[str, BySeed]:
    """What else was put at sharpen's site, as far as there is any of it."""
    rows = {name: results.arm(base, arm) for arm, name in VARIANTS.items()}
    return {name: arm for name, arm in rows.items() if arm}


def tests_against(arms: Mapping[str, BySeed], against: BySeed, pairs: int) -> tuple[dict[str, Paired], dict[str, bool]]:
    """Each other arm against one, and which of the differences stand together."""
    tests = {name: paired(arm, against, pairs) for name, arm in arms.items() if arm != against}
    there = {name: test for name, test in tests.items() if test is not None}
    return there, family(there)


def finding(results: Results, base: str) -> str:
    """The answer for one base."""
    sharpen, control = results.method(base, "sharpen"), results.arm(base, "no-splice")
    reached, without = accuracy(sharpen, PAIRS), accuracy(control, PAIRS)
    if reached is None or without is None:
        return f"**{NAMES[base].capitalize()}: not measured yet.**"
    chosen = sorted({results.chosen(base, "sharpen", s).removeprefix("site-") for s in sharpen})
    text = (
        f"**{NAMES[base].capitalize()}.** At {PAIRS} pairs the head that the sharpen test chooses "
        f"({', '.join(chosen)}; {count_seeds(sharpen)}) reaches {_share(reached.value)}, the same training without a "
        f"splice {_share(without.value)}."
    )
    return " ".join(part for part in (text, _against_rivals(results, base), _against_variants(results, base)) if part)


def _against_rivals(results: Results, base: str) -> str:
    """Sharpen's site against the others that were chosen."""
    sharpen = results.method(base, "sharpen")
    tests, stands = tests_against(main_rows(results, base), sharpen, PAIRS)
    groups: dict[str, list[str]] = {"beats": [], "does not differ from": [], "loses to": []}
    for method, name in METHOD_NAMES.items():
        if name not in tests:
            continue
        agree, shared = _agreement(results, base, method)
        note = f"; the same head in {agree} of {shared} seeds" if agree else ""
        difference = -tests[name].difference
        word = "does not differ from" if not stands[name] else "beats" if difference > 0 else "loses to"
        groups[word].append(f"{name} ({100 * difference:+.1f} points{note})")
    verdict = "; ".join(f"{word} {', '.join(names)}" for word, names in groups.items() if names)
    same = [METHOD_NAMES[m] for m in METHOD_NAMES if m != "sharpen" and results.method(base, m) == sharpen]
    text = f"It {verdict}." if verdict else ""
    if same:
        text += f" **{_list(same)} chose the same head in every seed: nothing is said about sharpen against that.**"
    return text.strip()


def _agreement(results: Results, base: str, method: str) -> tuple[int, int]:
    """In how many seeds the method chose what sharpen chose, and of how many that both have."""
    seeds = results.method(base, method).keys() & results.method(base, "sharpen").keys()
    return sum(results.chosen(base, method, s) == results.chosen(base, "sharpen", s) for s in seeds), len(seeds)


def _against_variants(results: Results, base: str) -> str:
    """What may be left out, and what may not, at the same site."""
    tests, stands = tests_against(variant_rows(results, base), results.method(base, "sharpen"), PAIRS)
    groups: dict[str, list[str]] = {"worse": [], "better": [], "no different": []}
    for name, test in tests.items():
        word = "no different" if not stands[name] else "better" if test.difference > 0 else "worse"
        groups[word].append(f"{name} ({100 * test.difference:+.1f} points)")
    parts = [f"{word} with {', '.join(names)}" for word, names in groups.items() if names]
    return f"At that site it is {'; '.join(parts)}." if parts else ""


def best_site(found: Sequence[Site]) -> str:
    """The site that gained most, and where the predictions had it."""
    best = max(found, key=lambda site: site.gain)
    places = {}
    for name in ("sharpen", "ablation", "attribution"):
        places[name] = 1 + sum(site.predicted[name] > best.predicted[name] for site in found)
    listed = ", ".join(f"{name} {place}" for name, place in places.items())
    return (
        f"Of these {len(found)} sites {best.head} gained most ({100 * best.gain:+.1f} points). Its place by each "
        f"prediction, 1 being the best: {listed}."
    )


def layer_or_head(found: Sequence[Site], winning: int) -> str:
    """How far heads of one layer are apart, and how far layers are."""
    parts = spread(found, winning)
    if parts is None:
        return ""
    means = ", ".join(f"layer {layer} {100 * gain:+.1f}" for layer, gain in parts.layers.items())
    if parts.between > 2 * parts.within:
        verdict = "**It is mostly the layer.**"
    elif parts.within > 2 * parts.between:
        verdict = "**It is mostly the head.**"
    else:
        verdict = "**Both count: neither spread is twice the other.**"
    counts = {layer: sum(layer_of(site.head) == layer for site in found) for layer in parts.layers}
    noise = f"; the same site in different seeds by {100 * parts.noise:.1f}" if math.isfinite(parts.noise) else ""
    heads = ", ".join(f"{count} of layer {layer}" for layer, count in counts.items())
    return (
        f"**The layer or the head?** Heads of layer {winning}, which the sharpen test chose, differ by a standard "
        f"deviation of {100 * parts.within:.1f} points; the layers' mean gains ({means} points; {heads}) by "
        f"{100 * parts.between:.1f}{noise}. {verdict}"
    )


def count_seeds(arm: BySeed) -> str:
    return f"{len(arm)} seed{'s' if len(arm) != 1 else ''}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _list(names: Sequence[str]) -> str:
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return text[0].upper() + text[1:]
