"""Registry of locating methods, with their columns, units and costs. Imports no torch.

Recipes, tables, figures and pages are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from surgery.errors import RecipeError
from surgery.recipe.section import Section
from surgery.registry import Registry
from surgery.types import Reads


@dataclass(frozen=True)
class Unit:
    """How scores in a unit are displayed.

    Attributes:
        title: heading of scores in this unit.
        digits: number of digits after the decimal point.
    """

    title: str
    digits: int


_UNITS = {
    "logits": Unit("Answer margin (logits)", 2),
    "accuracy": Unit("Accuracy (share of prompts)", 3),
    "share": Unit("Attention pattern (0 to 1)", 3),
    "tokens": Unit("Attention spread (tokens)", 1),
    "nats": Unit("Divergence of the answer (nats)", 3),
}


def unit_of(name: str) -> Unit:
    """Look up how a unit is displayed. A unit that is not listed gets its name as title, and 3 digits."""
    return _UNITS.get(name, Unit(name[:1].upper() + name[1:], 3))


@dataclass(frozen=True)
class Column:
    """A score that a method gives every head.

    Columns of one unit share a scale.

    Attributes:
        name: its key in `scores` of heads.json.
        note: one line on what it measures. With an effect it completes "margin lost with the head ...".
        unit: `logits`, `share`, `tokens`, `nats`, or any other name.
        effect: set if the method returns scores of the changed model. The column is then the margin lost or gained
            against the clean model, and `NAME_accuracy` the accuracy. None if it returns the numbers themselves.
    """

    name: str
    note: str
    unit: str = "logits"
    effect: Literal["loss", "gain"] | None = None

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def caption(self) -> str:
        """One sentence for a page."""
        title = unit_of(self.unit).title
        if self.effect is not None:
            return f"{title} {'lost' if self.effect == 'loss' else 'gained'} with the head {self.note}."
        return f"{title}: {self.note}." if self.note else f"{title}."


@dataclass(frozen=True)
class Method:
    """A way to score heads. Fields are as in `register_method`; `ranks` is a value of `splice.select`, or empty."""

    name: str
    columns: tuple[Column, ...]
    measure: Callable[[Any], Any]
    ranks: str = ""
    greedy: bool = False
    passes: float = 0.0
    passes_per_mixer: float = 0.0
    decode_step: bool = False
    needs_text: bool = False
    gloss: str = ""
    options: type[Section] | None = None

    def __post_init__(self) -> None:
        for name in ("__module__", "__qualname__"):  # shown in the registry's errors
            object.__setattr__(self, name, getattr(self.measure, name))

    @property
    def measures_reads(self) -> bool:
        """Whether a column is a position that a head may read, so that `ScoredHead.reads` follows from the method."""
        return any(column.name in get_args(Reads) for column in self.columns)

    @property
    def changes_heads(self) -> bool:
        """Whether the method returns scores of changed models, for single heads and for whole layers."""
        return any(column.effect for column in self.columns)


_OURS = ("surgery.locate.built_in",)
_PLUGINS = {  # in a checkout, with what was measured of them
    "attribution": "bench.plugins.baselines",
    "hidden_attention": "bench.plugins.hidden_attention",
    "integrated_gradients": "bench.plugins.baselines",
    "layer_divergence": "bench.plugins.baselines",
    "retrieval_score": "bench.plugins.baselines",
}
METHODS: Registry[Method] = Registry("locating method", _OURS, _PLUGINS)
RANKINGS: Registry[Method] = Registry("way to select heads", _OURS, _PLUGINS)  # by the value of splice.select
UNRANKED = {  # other values of splice.select, each with how it selects heads
    "random": "drawn at random",
    "uniform": "spaced evenly over the model",
    "list": "listed in the recipe",
}


def gloss_of(select: str) -> str:
    """Explain a value of `splice.select` in a few words; empty if its method has no gloss."""
    return UNRANKED.get(select) or (RANKINGS[select].gloss if select in RANKINGS else "")


def is_greedy(select: str) -> bool:
    """Whether this value of `splice.select` chooses heads one after the other; see `register_method`."""
    return select in RANKINGS and RANKINGS[select].greedy


def register_method(
    name: str,
    columns: Sequence[Column],
    *,
    ranks: bool | str = False,
    greedy: bool = False,
    passes: float = 0.0,
    passes_per_mixer: float = 0.0,
    decode_step: bool = False,
    needs_text: bool = False,
    gloss: str = "",
    options: type[Section] | None = None,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function that scores every head on one batch of prompts.

    The function takes a `surgery.locate.methods.LocateBatch` and returns a dict by column. For a column with an effect
    its value is a list with one `ChoiceScores` of the changed model for each of `batch.items`; for others it is an
    array or tensor of shape (heads, prompts), heads in the order of `batch.run.specs`.

    Args:
        name: name in `locate.methods`.
        columns: what the function returns; all with an effect, or none.
        ranks: let `splice.select` rank heads by the best of these columns, under the method's name or another one.
        greedy: with `splice.num_heads` above 1, choose heads one after the other, each by the gain of its oracle read
            given those of the heads already chosen. By default the best heads of the ranking are chosen.
        passes: full forward passes per prompt; a backward pass counts as two. `ablate` and `change_at_query` count
            their own.
        passes_per_mixer: passes for each mixer, each from that mixer to the last layer.
        decode_step: heads are changed at the query alone, by decode steps from cached states. The clean query can
            then be a decode step too, which saves half of the clean passes. Activations of other tokens are not kept.
        needs_text: the function reads `batch.documents`.
        gloss: the ranking in two to five words, for reports and cards that name it.
        options: class of what a recipe may set in `locate.method_options`. The function gets it from
            `section.options_of`.

    Raises:
        RecipeError: another method has this name, ranking or one of the columns, or `columns` is empty or mixes columns
            with and without an effect.
    """
    if len({column.effect is None for column in columns}) != 1:
        raise RecipeError("locating method", name, "Pass at least one column: all with an effect, or all without.")
    select = name if ranks is True else ranks or ""
    if select in UNRANKED:
        raise RecipeError("way to select heads", select, "It selects heads without scores. Choose another name.")

    def register(measure: Callable[[Any], Any]) -> Callable[[Any], Any]:
        costs = (passes, passes_per_mixer, decode_step, needs_text)
        method = Method(name, tuple(columns), measure, select, greedy, *costs, gloss, options)
        METHODS.check_free(name, method)  # before either registry changes
        _check_columns(name, columns)
        if select:
            RANKINGS.register(select, method)
        METHODS.register(name, method)
        return measure

    return register


def _check_columns(name: str, columns: Sequence[Column]) -> None:
    """Raise RecipeError if another method has one of these columns: scores of heads are looked up by column."""
    taken = {key: other for other, method in METHODS.registered() if other != name for key in _keys(method.columns)}
    for key in _keys(columns):
        if key in taken:
            hint = f"The method {taken[key]} has a column of this name already. Choose another name."
            raise RecipeError(f"locating method {name}: column", key, hint)
        taken[key] = name


def _keys(columns: Sequence[Column]) -> list[str]:
    """Keys in `scores` of heads.json."""
    return [key for c in columns for key in ((c.name, f"{c.name}_accuracy") if c.effect else (c.name,))]


def all_columns() -> dict[str, Column]:
    """Every column of every method, by name, in the order of registration."""
    return {column.name: column for _, method in METHODS.items() for column in method.columns}
