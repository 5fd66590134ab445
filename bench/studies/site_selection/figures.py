"""Figures of the study: accuracy of every arm, and predicted against measured gain of every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench.studies.site_selection.arms import layer_of
from bench.studies.site_selection.statistics import Correlation, Site
from surgery.report.figures.canvas import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    add_axes,
    add_heading,
    new_figure,
    save,
    style,
)
from surgery.types import Interval

_LAYERS = (BLUE, ORANGE, GREEN, PURPLE)
_MARKS = ("o", "s", "^", "D")


@style()
def bars_by_arm(
    arms: Mapping[str, tuple[Interval, Sequence[float]]], folder: Path, title: str, note: str, control: str
) -> list[Path]:
    """Draw one bar per arm with its interval, and one dot per seed: `arms.*`. Returns the paths.

    Args:
        arms: name -> accuracy over all seeds, and the accuracy of each seed; drawn from above in that order.
        control: the arm whose accuracy is drawn as a line across, if it is there.
    """
    height = 0.27 * len(arms)
    figure = new_figure(7.4, height + 1.4)
    add_heading(figure, title, note)
    axes = add_axes(figure, 2.9, 0.7, 4.2, height)
    rows = []
    for place, (name, (interval, seeds)) in enumerate(arms.items()):
        colour = GREY if name == control else BLUE
        axes.barh(place, interval.value, height=0.62, color=colour, alpha=0.35, linewidth=0)
        axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=1.6)
        axes.plot(seeds, [place] * len(seeds), "o", color=INK, markersize=3, alpha=0.8)
        rows.append([name, interval.value, interval.low, interval.high, interval.n, *seeds])
    if control in arms:
        axes.axvline(arms[control][0].value, color=MUTED, linewidth=0.9, linestyle=":")
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlim(0, 1.01)
    axes.set_xlabel("accuracy")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    most = max((len(seeds) for _, seeds in arms.values()), default=0)
    header = ["arm", "accuracy", "low", "high", "n", *(f"seed{i}" for i in range(most))]
    return save(figure, folder, "arms", header, rows)


PREDICTORS = {"sharpen": "sharpen test: gain from a perfect read", "ablation": "ablation: loss without the head"}


@style()
def predicted_and_reached(
    found: Sequence[Site], correlations: Mapping[str, Correlation | None], folder: Path, title: str, note: str
) -> list[Path]:
    """Draw the measured gain of each site against its predictors: `sites.*`. Returns the paths.

    Args:
        correlations: by predictor; written above its panel.
    """
    figure = new_figure(7.6, 4.5)
    add_heading(figure, title, note)
    layers = sorted({layer_of(site.head) for site in found})
    for index, (predictor, label) in enumerate(PREDICTORS.items()):
        axes = add_axes(figure, 0.75 + 3.5 * index, 1.15, 2.95, 2.5)
        for layer in layers:
            chosen = [site for site in found if layer_of(site.head) == layer]
            x = [site.predicted[predictor] for site in chosen]
            look = {"color": _LAYERS[layer % 4], "marker": _MARKS[layer % 4]}
            axes.scatter(x, [site.gain for site in chosen], s=24, alpha=0.85, label=f"layer {layer}", **look)
        _name_best(axes, found, predictor)
        axes.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
        axes.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
        axes.set_xlabel(f"{label} (logits)", size=8)
        axes.set_title(_correlation_text(correlations[predictor]), size=8, color=MUTED, loc="left")
        if index == 0:
            axes.set_ylabel("gain after training (accuracy)")
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=len(layers), fontsize=8)
    rows = [[s.head, *(s.predicted[p] for p in PREDICTORS), s.gain, *s.seeds] for s in found]
    most = max((len(s.seeds) for s in found), default=0)
    return save(figure, folder, "sites", ["head", *PREDICTORS, "gain", *(f"seed{i}" for i in range(most))], rows)


def _name_best(axes: Axes, found: Sequence[Site], predictor: str) -> None:
    """Label the site that the predictor would choose, and the site with the largest gain."""
    best = {max(found, key=lambda s: s.predicted[predictor]).head, max(found, key=lambda s: s.gain).head}
    middle = sum(axes.get_xlim()) / 2
    for site in (s for s in found if s.head in best):
        x = site.predicted[predictor]
        side = {"xytext": (-6, 5), "ha": "right"} if x > middle else {"xytext": (6, 5), "ha": "left"}
        axes.annotate(site.head, (x, site.gain), textcoords="offset points", size=8, color=INK, **side)


def _correlation_text(found: Correlation | None) -> str:
    if found is None:
        return "too few sites"
    s, p = found.spearman, found.pearson
    return f"Spearman {s.value:.2f} [{s.low:.2f}, {s.high:.2f}]\nPearson {p.value:.2f} [{p.low:.2f}, {p.high:.2f}]"
