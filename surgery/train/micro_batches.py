"""Micro-batches: put the documents of a step into forward passes, and count the terms of its losses.

Every loss is a sum divided by the number of terms in the whole step, over all micro-batches and processes. So the
gradient of a step does not depend on the split.

Shape legend: B rows, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RunError
from surgery.probes.documents import Document
from surgery.recipe import Source, TrainStage
from surgery.recipe.objectives import OBJECTIVES, needs_of
from surgery.registry import plugin_errors
from surgery.train.packing import pack, trimmed

_LOG = logging.getLogger(__name__)
# Tokens of padding that may save a pass, whose operators cost time to launch. On an H100, a pass of 24M weights takes
# the host as long as 100,000 tokens take the GPU; larger models need fewer. That on a CPU is an estimate.
PASS_COST_ON_CPU, PASS_COST = 128, 8192

Counts = Mapping[tuple[int, str], float]  # index of a source, objective -> number of terms


@dataclass(frozen=True)
class MicroBatch:
    """Documents of one forward and backward pass."""

    batch: EncodedBatch  # with several sources, `batch.sources` has the source of each token
    sources: tuple[int, ...]  # indices of the documents' sources in their stage
    counts: Counts  # number of terms of each objective
    real: bool = True  # False for a placeholder on a process with fewer micro-batches than others: it has no gradient

    def pin_memory(self) -> MicroBatch:
        """Copy into page-locked memory, from which a GPU reads without blocking the host."""
        return replace(self, batch=self.batch.pin_memory())

    def within(self, tokens: int | None) -> Iterator[MicroBatch]:
        """Split the rows into passes of at most so many tokens, padding included, but at least one row.

        `counts` are those of the whole.
        """
        rows, width = self.batch.input_ids.shape
        size = rows if tokens is None else max(1, tokens // width)
        if size >= rows:
            yield self
            return
        for start in range(0, rows, size):
            yield replace(self, batch=trimmed(self.batch[start : start + size]))


@dataclass(frozen=True)
class StepSplit:
    """How the documents of a step are put into passes."""

    sources: Sequence[Source]  # of the stage
    rank: int = 0  # of this process
    world: int = 1  # number of processes, which share the documents
    limit: int | None = None  # largest number of documents in a pass; all if None
    packing: bool = False  # put several documents into one row
    in_step: bool = False  # all processes run the same number of passes, to gather sharded weights together
    pass_cost: int = PASS_COST_ON_CPU  # tokens of padding that may save a pass

    def __call__(self, documents: Sequence[Sequence[Document]], tokenizer: PreTrainedTokenizerBase) -> list[MicroBatch]:
        """Encode this process's share of the documents of a step, by source, and put them into passes on the CPU."""
        shares = [drawn[self.rank :: self.world] for drawn in documents]
        owners = [index for index, share in enumerate(shares) for _ in share]
        encoded, lengths = None, list[int]()
        if owners:  # all documents of a step in one call of the tokenizer
            encoded = encode([document for share in shares for document in share], tokenizer, choices=False)
            lengths = encoded.attention_mask.sum(1).tolist()
            of_token = torch.tensor(owners)[:, None].expand(encoded.input_ids.shape)
            encoded = replace(encoded, sources=of_token)
        micro_batches: list[MicroBatch] = []
        for group in self.groups():
            passes = self._passes([row for row, owner in enumerate(owners) if owner in group], lengths)
            micro_batches += [self._micro_batch(encoded[torch.tensor(rows)]) for rows in passes if encoded]
            most = 1  # with fewer documents than processes, some have none
            if self.limit and self.in_step:
                most = -(-sum(len(documents[index][:: self.world]) for index in group) // self.limit)
            if most > len(passes):
                batch = encode(documents[group[0]][:1], tokenizer, choices=False)
                batch = replace(batch, sources=torch.full_like(batch.input_ids, group[0]))
                micro_batches += [self._micro_batch(batch, real=False)] * (most - len(passes))
        return micro_batches

    def groups(self) -> list[list[int]]:
        """List the sources whose documents may share a pass: they need the same outputs of base and teacher.

        Padded rows of several processes are not shared: all processes need the same passes.
        """
        groups: dict[tuple[frozenset[str], int], list[int]] = {}
        for index, source in enumerate(self.sources):
            names = source.weights.at(0.5)
            joins = all(OBJECTIVES[name].takes_weights for name in names) and (self.packing or self.world == 1)
            others = frozenset(need for need in needs_of(names) if need.startswith(("base.", "teacher.")))
            groups.setdefault((others, -1 if joins else index), []).append(index)
        return list(groups.values())

    def _passes(self, rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """Assign the documents of a group to passes. Padded documents share one with others of similar length."""
        if self.limit:  # documents of similar length together need less padding
            rows = sorted(rows, key=lengths.__getitem__)
            return [rows[i : i + self.limit] for i in range(0, len(rows), self.limit)]
        if self.packing or self.world > 1:
            return [rows] if rows else []
        passes, width = list[list[int]](), 0
        for row in sorted(rows, key=lengths.__getitem__):
            if passes and len(passes[-1]) * (lengths[row] - width) <= self.pass_cost:
                passes[-1].append(row)
            else:
                passes.append([row])
            width = lengths[row]
        return [sorted(rows) for rows in passes]

    def _micro_batch(self, batch: EncodedBatch, real: bool = True) -> MicroBatch:
        """Count the terms of a pass, and pack its documents if they share rows."""
        batch = trimmed(batch)
        sources_B = batch.sources[:, 0]  # type: ignore[index]
        indices = tuple(dict.fromkeys(sources_B.tolist()))
        counts: dict[tuple[int, str], float] = {}
        for index in indices:
            own = replace(batch[sources_B == index], sources=None)
            for name in self.sources[index].weights.at(0.5):
                with plugin_errors(f"objective {name}", OBJECTIVES[name]):
                    counts[index, name] = OBJECTIVES[name].count(own)
        if len(indices) == 1:
            batch = replace(batch, sources=None)
        return MicroBatch(pack(batch) if self.packing else batch, indices, counts, real)


def step_counts(
    sources: Sequence[Source], micro_batches: Sequence[MicroBatch], spliced: bool, accelerator: Accelerator
) -> dict[tuple[int, str], float]:
    """Count the terms of every objective in the whole step, by source, as the share of one process.

    Raises:
        RunError: an objective has no terms. In a model that is not `spliced`, those that need a splice may have none.
    """
    totals = {(i, name): 0.0 for i, source in enumerate(sources) for name in source.weights.at(0.5)}
    for part in micro_batches:
        for key, count in part.counts.items():
            totals[key] += count * part.real
    world = accelerator.num_processes
    if world > 1:
        values = torch.tensor(list(totals.values()), dtype=torch.float64, device=accelerator.device)
        totals = dict(zip(totals, (accelerator.reduce(values, "sum") / world).tolist(), strict=True))
    for (index, name), count in totals.items():
        if count:
            continue
        source, objective = sources[index], OBJECTIVES[name]
        if source.data is not None and source.data.columns.finds_spans and "gold_positions" in objective.needs:
            # With `answer_span: auto`, rows may lack a gold position. A loss without terms is 0, not 0 / 0.
            totals[index, name] = 1.0
        elif spliced or not objective.needs_splice:
            hint = f"No document of this step has a term for {name}. Set the weight to 0."
            raise RunError(f"{source.field}.weights", name, hint)
    return totals


def log_missing_reads(
    stage: TrainStage, documents: Sequence[Sequence[Document]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log how many answer tokens of a step have no gold position, for the sources that need them."""
    for source, drawn in zip(stage.sources, documents, strict=True):
        marked = [d for d in drawn if d.questions and all(q.segment and q.value for q in d.questions)]
        if not marked or not source.weights.needs("gold_positions"):
            continue
        batch = encode(marked, tokenizer, choices=False)
        reads = batch.read_query >= 0
        missing = int((reads & (batch.read_answer_token < 0)).sum())
        if missing:
            text = "%s: no token of the segment holds %d of %d answer tokens of the first step. %s"
            _LOG.warning(text, source.field, missing, int(reads.sum()), "Attention is not supervised there.")
