"""Rows of the tables: which arms each table holds, in which order, and their labels."""

from __future__ import annotations

from collections.abc import Mapping

from bench.studies.site_selection.arms import AGAIN, SECOND, SHIPPED
from bench.studies.site_selection.statistics import BySeed, Paired, Results, family, paired

PAIRS = 32  # number of pairs at which arms are compared
BASES = {SHIPPED: "the shipped base", SECOND: "the second base", AGAIN: "the second base, pretrained again"}
CONTROL = "no splice"
METHODS = {
    "random": "random head",
    "uniform": "middle layer (8 heads)",
    "divergence": "KL-guided layer (8 heads)",
    "attribution": "attribution head",
    "ablation": "ablation head",
    "sharpen_layer": "oracle-read layer (8 heads)",
    "sharpen": "oracle-read head",
}
VARIANTS = {
    "unsupervised": "no attention supervision",
    "random-init": "random projections",
    "random-init-narrow": "random projections, width of the copies",
    "random-init-unsupervised": "random projections, no supervision",
    "replace": "replaces the head",
    "replace-random-init": "replaces the head, random projections",
    **{f"widened-{width}": f"copies widened to {width}" for width in (16, 32, 64, 128)},
    **{f"replace-widened-{width}": f"replaces the head, copies widened to {width}" for width in (32, 64)},
    "linear": "linear attention",
    "linear-unsupervised": "linear attention, no supervision",
    "hidden-supervised": "no splice, hidden attention supervised",
    "two-heads": "two heads",
    "four-heads": "four heads",
    "new-heads-only": "only the new head is trainable",
    "lora": "new head and LoRA",
}


def main_rows(results: Results, base: str) -> dict[str, BySeed]:
    """The control and the arm that each method chose, if there is any result."""
    rows = {CONTROL: results.arm(base, "no-splice")}
    rows |= {label: results.method(base, method) for method, label in METHODS.items()}
    return {label: arm for label, arm in rows.items() if arm}


def variant_rows(results: Results, base: str) -> dict[str, BySeed]:
    """Variants of the splice at the site of the oracle-read head, if there is any result."""
    rows = {label: results.arm(base, arm) for arm, label in VARIANTS.items()}
    return {label: arm for label, arm in rows.items() if arm}


def tests_against(arms: Mapping[str, BySeed], against: BySeed, pairs: int) -> tuple[dict[str, Paired], dict[str, bool]]:
    """Paired tests of every other arm against one.

    Returns:
        the tests by arm, and whether each is significant with the family-wise error at 0.05 (Holm).
    """
    tests = {label: paired(arm, against, pairs) for label, arm in arms.items() if arm != against}
    there = {label: test for label, test in tests.items() if test is not None}
    return there, family(there)
