"""Run the locating methods of a recipe on all prompts.

Shape legend: B prompts of a batch, C columns of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from surgery.data.ranking import ChoiceScores
from surgery.errors import ModelError
from surgery.locate.batches import PromptBatches
from surgery.locate.clean_run import CleanRun
from surgery.locate.methods import LocateBatch
from surgery.locate.scores import Array, Record, Table, plain
from surgery.locate.selection import search_rounds, still_candidates
from surgery.recipe import Splice
from surgery.recipe.methods import METHODS, Method
from surgery.registry import plugin_errors
from surgery.types import HeadId, MixerSpec

Item = tuple[HeadId, ...]  # heads that are changed together


def items_of(specs: Sequence[MixerSpec], layers: bool) -> list[Item]:
    """List the items to measure: every single head and, with `layers`, every mixer as a whole."""
    heads: list[Item] = [(head,) for spec in specs for head in spec.heads]
    return heads + ([spec.heads for spec in specs] if layers else [])


def measure_heads(
    prompts: PromptBatches,
    specs: Sequence[MixerSpec],
    sites: Sequence[MixerSpec],
    splice: Splice,
    tick: Callable[[], None],
) -> Table:
    """Measure all items on all prompts. A search measures in rounds and drops heads between them.

    `sites` are the mixers of `specs` that can be spliced.
    """
    section = prompts.section
    items = items_of(specs, section.layers)
    heads = [head for spec in specs for head in spec.heads]
    sizes = [len(batch) for batch in prompts.batches]
    rounds = search_rounds(section.search.first, sum(sizes)) if section.search else [sum(sizes)]
    alive, begin = list(range(len(items))), 0
    records: list[Record] = []
    for number, count in enumerate(rounds, start=1):
        end = begin
        while end < len(sizes) and sum(sizes[:end]) < count:
            end += 1
        with prompts.gathered() as measured:
            for index, run in prompts.clean_runs(range(begin, end)):
                documents = prompts.documents(index)
                other = prompts.counterfactual(index)
                batch = LocateBatch(run, [items[i] for i in alive], section, prompts.tokenizer, documents, other)
                measured[index] = measure_batch(batch, index, alive, len(items), tick)
                del run, batch  # frees the activations before the next batch runs
        records += measured.values()
        begin = end
        if number < len(rounds):
            alive = still_candidates(Table(records), alive, heads, sites, section, splice, len(rounds) - 1)
    return Table(records)


def measure_batch(
    batch: LocateBatch, index: int, alive: Sequence[int], num_items: int, tick: Callable[[], None]
) -> Record:
    """Run every method of the recipe on one batch, whose items have the indices `alive` among all; others get NaN.

    `tick` is called after each column, or after each method that scores all heads at once.
    """
    run = batch.run
    record = Record(index, plain(run.scores))
    shares = [1 - spec.layer / run.model.config.num_hidden_layers for spec in run.specs]
    for method in (METHODS[name] for name in batch.section.methods):
        with plugin_errors(f"locating method {method.name}", method):
            scores = method.measure(batch)
        names = [column.name for column in method.columns]
        if not isinstance(scores, Mapping):
            hint = f"Return a dict with the columns {', '.join(names)}."
            raise ModelError("locate.methods", f"{method.name} returned {type(scores).__name__}", hint)
        if set(scores) != set(names):
            hint = f"It was registered with the columns {', '.join(names)}. Return exactly these."
            raise ModelError("locate.methods", f"{method.name} returned {', '.join(scores) or 'nothing'}", hint)
        for column in method.columns:
            if column.effect is not None:
                changed = scores[column.name]
                if len(changed) != len(batch.items) or not all(isinstance(x, ChoiceScores) for x in changed):
                    hint = (
                        f"A column with an effect is a list of {len(batch.items)} `ChoiceScores`, as of `batch.items`."
                    )
                    raise ModelError("locate.methods", f"{method.name} returned something else", hint)
                whole = np.full((num_items, *record.clean.shape), np.nan)
                whole[list(alive)] = [plain(scored) for scored in changed]
                record.columns[column.name] = whole
                tick()
            else:
                record.estimates[column.name] = _estimate(method, scores[column.name], run, num_items)
        run.passes += (method.passes + method.passes_per_mixer * sum(shares)) * len(run.batch)
        if not method.changes_heads:
            tick()
    return record


def _estimate(method: Method, values: object, run: CleanRun, num_items: int) -> Array:
    """(C,B) estimates of all items from those of the heads, (heads,B). Layers get NaN."""
    heads, B = sum(spec.num_heads for spec in run.specs), len(run.batch)
    array = torch.as_tensor(values).detach().double().cpu().numpy()
    if array.shape != (heads, B):
        hint = f"Return one number for each head and prompt: shape ({heads}, {B})."
        raise ModelError("locate.methods", f"{method.name} returned shape {array.shape}", hint)
    whole = np.full((num_items, B), np.nan)
    whole[:heads] = array
    return whole
