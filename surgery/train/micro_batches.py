"""A step, cut up. Owns: which documents go through the model together, and what their losses are divided by.

Must never know: models, losses, optimizers. Every loss is a sum divided by how many terms the whole step has, over all
micro-batches and processes: however a step is cut up, its gradient is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RunError
from surgery.probes.documents import Document
from surgery.recipe import Source
from surgery.train.losses import counts
from surgery.train.row_packing import pack


@dataclass(frozen=True)
class MicroBatch:
    """Documents that go through the model together.

    Attributes:
        index: of the source in its stage.
        documents: how many they are.
        counts: how many terms each of its objectives has, over the whole step, for one process.
        real: False for a stand-in, where a process has no document of its own; it counts for nothing.
    """

    source: Source
    index: int
    batch: EncodedBatch
    documents: int
    counts: Mapping[str, float] = field(default_factory=dict)
    real: bool = True


def cut(
    sources: Sequence[Source],
    documents: Sequence[Sequence[Document]],
    at_once: Mapping[int, int | None],
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    packing: bool = False,
) -> list[MicroBatch]:
    """This process's share of a step.

    Args:
        documents: by source, of all processes.
        at_once: by source, how many go through the model together; all if None.
        packing: those that go together share rows.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    made: list[MicroBatch] = []

    def encoded(part: Sequence[Document]) -> EncodedBatch:
        batch = encode(part, tokenizer)
        return (pack(batch) if packing else batch).to(accelerator.device)

    for index, source in enumerate(sources):
        mine, asked = documents[index][rank::world], at_once[index]
        if asked:  # those of a length together: less padding
            mine = sorted(mine, key=lambda document: len(document.text))
        size, most = asked or max(1, len(mine)), 1
        if asked and accelerator.is_fsdp2:  # weights are gathered for each, on all processes together
            most = -(-len(documents[index][::world]) // asked)
        chunks = [mine[i : i + size] for i in range(0, len(mine), size)]
        made += [MicroBatch(source, index, encoded(chunk), len(chunk)) for chunk in chunks]
        for _ in range(most - len(chunks)):
            made.append(MicroBatch(source, index, encoded(documents[index][:1]), 1, real=False))
    return made


def counted(
    sources: Sequence[Source], micro: Sequence[MicroBatch], spliced: bool, accelerator: Accelerator
) -> list[MicroBatch]:
    """The same, with the number of terms of every source's objectives in the whole step, for one process.

    Args:
        spliced: whether there are spliced heads, which `attention` and `mixing` are about.

    Raises:
        RunError: no document of the step has anything for an objective.
    """
    total = {(i, name): 0 for i, s in enumerate(sources) for name in sorted(s.weights.at(0.5))}
    for part in micro:
        for name, count in counts(part.batch, part.source.weights.at(0.5)).items():
            total[part.index, name] += count * part.real
    values = torch.tensor(list(total.values()), dtype=torch.float64, device=accelerator.device)
    world = accelerator.num_processes
    if world > 1:
        values = accelerator.reduce(values, "sum")
    found = {key: float(value) / world for key, value in zip(total, values, strict=True)}
    for (index, name), count in found.items():
        if not count and (spliced or name not in ("attention", "reading", "mixing")):
            hint = f"No document of this step has anything for {name}; give it weight 0."
            raise RunError(f"train.sources.{index}.weights.{name}", sources[index].name, hint)
    return [replace(m, counts={name: c for (i, name), c in found.items() if i == m.index}) for m in micro]
