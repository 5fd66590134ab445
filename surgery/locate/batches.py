"""The clean passes over all prompts, one batch in memory at a time. Owns: which prompts, and who measures them.

Batches are dealt out to the processes in turn; what they found is gathered in the order of the batches, so that every
process knows all of it and the numbers do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError, SurgeryError, fitting
from surgery.locate.ablation_sweep import Sweep, Variant
from surgery.locate.scores import Record, plain
from surgery.models.loading import check_vocabulary
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Locate
from surgery.scoring.ranking import ranked

R = TypeVar("R")
ROUNDING = 1e-3  # logits; what two exact computations of one margin may differ by


class Prompts:
    """Batches of prompts, and the model that they are put to.

    KV-retrieval prompts of evaluation words unless batches are given: left-padded, up to the query.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        section: Locate,
        seed: int,
        batches: Sequence[EncodedBatch] | None = None,
    ) -> None:
        self._model, self.tokenizer, self._size = model, tokenizer, section.batch_size
        self._unchecked = bool({"query", "sharpen"} & set(section.methods))
        at_query = {"query", "sharpen"} if section.fill == "zero" else {"sharpen"}
        self._stepwise = set(section.methods) <= at_query and not section.backups
        self.passes = 0.0  # full forward passes of one prompt, by all processes
        self._documents: list[list[Document]] | None = None
        if batches is None:
            check_vocabulary(tokenizer, model.config)
            n, size = section.examples, section.batch_size
            documents = [kv_document(rng_of("locate", seed, i), section.pairs, split="eval") for i in range(n)]
            self._documents = [documents[i : i + size] for i in range(0, n, size)]
            batches = [encode(chunk, tokenizer, padding_side="left", until_answer=True) for chunk in self._documents]
        self.batches = list(batches)

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the choices of each prompt's last question."""
        counts = torch.cat([(batch.choice_ids[:, -1] >= 0).sum(-1) for batch in self.batches])
        return float((1 / counts.clamp(min=1)).mean())

    @property
    def _smaller(self) -> str:
        """What takes less memory."""
        return "Lower it." if self._size > 1 else "Lower locate.pairs, or set a smaller base.dtype."

    def __len__(self) -> int:
        return len(self.batches)

    def documents(self, index: int) -> list[Document] | None:
        """The text of a batch; None where batches were given."""
        return self._documents[index] if self._documents is not None else None

    def clean(self) -> list[Record]:
        """The unchanged model on every prompt, in one plain pass, before anything is measured."""

        def one(index: int) -> tuple[int, Record, float]:
            batch = self.batches[index]
            return index, Record(index, plain(ranked(self._model, [batch]))), float(len(batch))

        return self._dealt(one, list(range(len(self.batches))))

    def map(self, measure: Callable[[int, Sweep], R], batches: range | None = None) -> list[R]:
        """What `measure(index, sweep)` gives for each batch, in their order; this process runs its share of them."""

        def one(index: int) -> tuple[int, R, float]:
            sweep = self._sweep(index)
            return index, measure(index, sweep), sweep.passes

        return self._dealt(one, list(batches if batches is not None else range(len(self.batches))))

    def _dealt(self, one: Callable[[int], tuple[int, R, float]], asked: list[int]) -> list[R]:
        """What `one` gives for each of these batches: its index, the result, and the passes that it took."""

        def work(mine: list[int]) -> list[tuple[int, R, float]]:
            with fitting("locate.batch_size", self._size, self._smaller):
                return [one(index) for index in mine]

        if not (distributed.is_available() and distributed.is_initialized()):
            shares = [work(asked)]
        else:
            shares = self._shared(work, asked)
        found = sorted((x for share in shares for x in share), key=lambda x: x[0])
        self.passes += sum(passes for _, _, passes in found)
        return [result for _, result, _ in found]

    def _shared(self, work: Callable[[list[int]], R], asked: list[int]) -> list[R]:
        """What each process makes of its share. An error of one is raised by all, or the others would wait for it."""
        rank, processes = distributed.get_rank(), distributed.get_world_size()
        own: tuple[R | None, str] = (None, "")
        failure: SurgeryError | None = None
        try:
            own = (work(asked[rank::processes]), "")
        except SurgeryError as error:
            own, failure = (None, str(error)), error
        shares: list[tuple[R | None, str]] = [(None, "")] * processes
        distributed.all_gather_object(shares, own)
        if failure is not None:
            raise failure
        for other, (_, said) in enumerate(shares):
            if said:
                raise ModelError("locate", f"process {other}", said)
        return [share for share, _ in shares if share is not None]

    def _sweep(self, index: int) -> Sweep:
        batch = self.batches[index].to(self._model.device)
        if index == 0 and self._unchecked:  # by one process alone
            self._check_decode(Sweep(self._model, batch[:2]))
            self._unchecked = False
        return Sweep(self._model, batch, stepwise=self._stepwise)

    def _check_decode(self, sweep: Sweep) -> None:
        """Measuring at the query needs a cached step that is the forward pass."""
        clean = sweep.clean.margin
        apart = float((sweep.at_query([Variant()])[0].margin - clean).abs().max())
        if self._model.dtype == torch.float32 and apart > ROUNDING * max(1.0, float(clean.abs().max())):
            hint = "Its cached decode step is not its forward pass (a finite time_step_limit does that)."
            raise ModelError("locate", f"{apart:.3g} logits apart", hint)
