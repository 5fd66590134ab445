"""Micro-batches: split the documents of a step, and count the terms of its losses.

Every loss is a sum divided by the number of terms in the whole step, over all micro-batches and processes. So the
gradient of a step does not depend on the split.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RunError
from surgery.probes.documents import Document
from surgery.recipe import Source
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.registry import plugin_errors
from surgery.train.packing import pack

_LOG = logging.getLogger(__name__)
_PADDING = 1.25  # tokens of a joined pass for each token of the separate passes


@dataclass(frozen=True)
class MicroBatch:
    """Documents of one forward and backward pass.

    Attributes:
        source: the documents' source in the recipe.
        index: index of the source in its stage.
        batch: the documents as tensors.
        documents: number of documents.
        counts: number of terms of each objective over the whole step, for one process.
        real: False for a placeholder on a process that has fewer micro-batches than others. It has no effect on the
            gradient.
    """

    source: Source
    index: int
    batch: EncodedBatch
    documents: int
    counts: Mapping[str, float] = field(default_factory=dict)
    real: bool = True


def split_step(
    sources: Sequence[Source],
    documents: Sequence[Sequence[Document]],
    sizes: Mapping[int, int | None],
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    packing: bool = False,
) -> list[MicroBatch]:
    """Split this process's share of a step into micro-batches, without counts.

    Args:
        sources: of the stage.
        documents: documents of the step by source, for all processes.
        sizes: number of documents in a micro-batch by source; all documents if None.
        tokenizer: encodes the documents.
        accelerator: selects the share of this process.
        packing: put several documents into one row.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    micro_batches: list[MicroBatch] = []

    def encoded(part: Sequence[Document]) -> EncodedBatch:
        batch = encode(part, tokenizer, choices=False)
        return (pack(batch) if packing else batch).to(accelerator.device)

    for index, source in enumerate(sources):
        share, limit = documents[index][rank::world], sizes[index]
        if limit:  # documents of similar length together need less padding
            share = sorted(share, key=lambda document: len(document.text))
        size, most = limit or max(1, len(share)), 1
        if (
            limit and accelerator.is_fsdp2
        ):  # all processes need the same number of micro-batches to gather weights together
            most = -(-len(documents[index][::world]) // limit)
        chunks = [share[i : i + size] for i in range(0, len(share), size)]
        micro_batches += [MicroBatch(source, index, encoded(chunk), len(chunk)) for chunk in chunks]
        for _ in range(most - len(chunks)):
            micro_batches.append(MicroBatch(source, index, encoded(documents[index][:1]), 1, real=False))
    return micro_batches


def with_counts(
    sources: Sequence[Source], micro_batches: Sequence[MicroBatch], spliced: bool, accelerator: Accelerator
) -> list[MicroBatch]:
    """Count the terms of every objective in the whole step, by source, and add the counts to the micro-batches.

    Args:
        sources: of the stage.
        micro_batches: of this process.
        spliced: True if the model has spliced heads. Otherwise objectives that need a splice may have no terms.
        accelerator: sums the counts of all processes.

    Raises:
        RunError: an objective has no terms in the whole step.
    """
    totals = {(i, name): 0 for i, source in enumerate(sources) for name in source.weights.at(0.5)}
    for part in micro_batches:
        for name in part.source.weights.at(0.5):
            with plugin_errors(f"objective {name}", OBJECTIVES[name]):
                totals[part.index, name] += OBJECTIVES[name].count(part.batch) * part.real
    values = torch.tensor(list(totals.values()), dtype=torch.float64, device=accelerator.device)
    world = accelerator.num_processes
    if world > 1:
        values = accelerator.reduce(values, "sum")
    counts = {key: float(value) / world for key, value in zip(totals, values, strict=True)}
    for (index, name), count in list(counts.items()):
        if count:
            continue
        if _may_have_no_terms(sources[index], name):
            counts[index, name] = 1.0  # a loss without terms is 0, not 0 / 0
        elif spliced or not OBJECTIVES[name].needs_splice:
            hint = f"No document of this step has a term for {name}. Set the weight to 0."
            raise RunError(f"train.sources.{index}.weights.{name}", sources[index].name, hint)
    return [
        replace(part, counts={name: count for (i, name), count in counts.items() if i == part.index})
        for part in micro_batches
    ]


def join(
    micro_batches: Sequence[MicroBatch], sizes: Mapping[int, int | None], accelerator: Accelerator
) -> list[list[MicroBatch]]:
    """Group micro-batches that one forward pass can hold, so that short texts of several sources take one pass.

    The gradient is that of separate passes, up to rounding. A group has no more tokens than the largest micro-batch of
    the step, padding included, so memory does not grow. Sources are joined if their objectives need logits alone, such
    as `base_kl` and `lm`, on one process and without packing or `micro_batch`.

    Args:
        micro_batches: of this process.
        sizes: as in `split_step`.
        accelerator: with several processes nothing is joined: all need the same number of passes.
    """
    groups = [[part] for part in micro_batches]
    if accelerator.num_processes > 1:
        return groups
    largest = max(part.batch.input_ids.numel() for part in micro_batches)
    joinable = [part for part in micro_batches if sizes[part.index] is None and _compares_logits(part)]
    joinable.sort(key=lambda part: part.batch.input_ids.shape[1])
    group: list[MicroBatch] = []
    grouped: list[list[MicroBatch]] = []
    for part in joinable:
        width = part.batch.input_ids.shape[1]  # the largest so far
        padded = width * sum(len(x.batch) for x in (*group, part))
        alone = sum(x.batch.input_ids.numel() for x in (*group, part))
        if group and padded <= min(largest, _PADDING * alone):
            group.append(part)
        else:
            group = [part]
            grouped.append(group)
    return [[part] for part in micro_batches if not any(part is x for x in joinable)] + grouped


def _compares_logits(part: MicroBatch) -> bool:
    """Whether the objectives of a micro-batch need logits at every token alone, of rows with one document each."""
    return part.batch.documents is None and needs_of(part.source.weights.at(0.5)) <= {"base.logits"}


def shrink(sizes: dict[int, int | None], group: Sequence[MicroBatch], step: int, accelerator: Accelerator) -> None:
    """Reduce the micro-batches of a group that did not fit into memory, in place.

    Joined micro-batches run apart from then on. One alone is halved.

    Raises:
        RunError: a single document does not fit, or there are several processes.
    """
    if len(group) > 1:
        sizes.update({part.index: part.documents for part in group})
        return
    (part,) = group
    field = f"train.sources.{part.index}"
    if accelerator.num_processes > 1:
        hint = (
            "Out of memory. With several processes the size cannot be lowered automatically. Lower train.micro_batch."
        )
        raise RunError(field, f"{part.documents} documents in a micro-batch", hint)
    if part.documents == 1:
        hint = "Out of memory with one document. Shorten it, or set train.gradient_checkpointing."
        raise RunError(field, f"{part.batch.input_ids.shape[1]} tokens", hint)
    sizes[part.index] = part.documents // 2
    text = "step %d: out of memory; %s continues with %d documents in a micro-batch"
    _LOG.warning(text, step + 1, field, part.documents // 2)


def _may_have_no_terms(source: Source, objective: str) -> bool:
    """Whether a step of the source may have no term: with `answer_span: auto`, rows may lack a gold position."""
    finds_spans = source.data is not None and source.data.columns.finds_spans
    return finds_spans and "gold_positions" in OBJECTIVES[objective].needs
