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
from surgery.recipe.methods import METHODS, Method
from surgery.registry import plugin_errors
from surgery.types import HeadId, MixerSpec

Item = tuple[HeadId, ...]  # heads that are changed together


def items_of(specs: Sequence[MixerSpec], layers: bool) -> list[Item]:
    """List the items to measure: every single head and, with `layers`, every mixer as a whole."""
    heads: list[Item] = [(head,) for spec in specs for head in spec.heads]
    return heads + ([spec.heads for spec in specs] if layers else [])


def measure_heads(prompts: PromptBatches, specs: Sequence[MixerSpec], tick: Callable[[], None]) -> Table:
    """Measure all items on all prompts."""
    section, items = prompts.section, items_of(specs, prompts.section.layers)
    with prompts.gathered() as measured:
        for index, run in prompts.clean_runs():
            documents, other = prompts.documents(index), prompts.counterfactual(index)
            batch = LocateBatch(run, items, section, prompts.tokenizer, documents, other)
            measured[index] = measure_batch(batch, tick)
            del run, batch  # frees the activations before the next batch runs
    return Table(list(measured.values()))


def measure_batch(batch: LocateBatch, tick: Callable[[], None]) -> Record:
    """Run every method of the recipe on one batch.

    `tick` is called after each column, or after each method that scores all heads at once.
    """
    run = batch.run
    record = Record(plain(run.scores))
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
                record.columns[column.name] = np.stack([plain(scored) for scored in changed])
                tick()
            else:
                record.estimates[column.name] = _estimate(method, scores[column.name], run, len(batch.items))
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
