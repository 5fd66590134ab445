"""Draw exact answers by kind of prompt, for the base and arms of the study.

python -m bench.studies.scale.figure paper/scale/accuracy.png base=paper/scale/base.json "3 heads=FILE"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from bench.common import parser
from bench.studies.scale.prompts import KINDS
from surgery.files.atomic import read_json
from surgery.stats import bootstrap_mean

CONTEXTS = 8  # of each kind, which all arms were asked about
COLOURS = ("#8a8a8a", "#2b7bba", "#d1495b")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("arms", nargs="+", metavar="NAME=FILE", help="label and result of an arm")
    args = options.parse_args(arguments)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    rows = np.arange(len(KINDS))[::-1]
    for number, (name, _, path) in enumerate(arm.rpartition("=") for arm in args.arms):
        measured = read_json(Path(path))["measured"]
        contexts = np.array(
            [[text.count("1") / len(text) for text in measured[k.name]["exact"][:CONTEXTS]] for k in KINDS]
        )
        found = bootstrap_mean(contexts, 0)
        offset = 0.18 * ((len(args.arms) - 1) / 2 - number)
        ends = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
        style = {"fmt": "o", "color": COLOURS[number], "markersize": 6, "elinewidth": 1.5}
        axes.errorbar([i.value for i in found], rows + offset, xerr=ends, label=name, **style)
    axes.set_yticks(rows, [kind.name for kind in KINDS])
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("share of exact answers, 95% interval over contexts")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(args.out, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
