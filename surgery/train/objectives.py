"""What a batch is trained towards. Owns: which objectives a source asks for, and what each of them needs.

Must never know: steps, optimizers, how a step is cut up. The formulas stand in `objectives.py`.
Shape legend: B documents, T tokens, Q questions, H spliced heads of a layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.recipe import Distil, Source
from surgery.recipe.train import FROM_TEACHER
from surgery.train.divergence import TopK
from surgery.train.logits_cache import LogitsCache
from surgery.train.losses import (
    answer_loss,
    attention_loss,
    divergence_loss,
    hidden_loss,
    mixing_loss,
    reading_loss,
    text_loss,
)
from surgery.train.packing import apart
from surgery.train.shared_prefix import SharedPrefix
from surgery.train.teacher import Teacher
from surgery.types import Graft


@dataclass(frozen=True)
class Terms:
    """What objectives compare with.

    Attributes:
        distil: how two distributions are compared.
        grafts: the spliced heads, by layer.
        base, prefix: the frozen base, and what of it the model begins with.
        teacher, cache: the teacher, and its logits on disk.
    """

    distil: Distil
    grafts: tuple[Graft, ...] = ()
    base: PreTrainedModel | None = None
    prefix: SharedPrefix | None = None
    teacher: Teacher | None = None
    cache: LogitsCache | None = None

    def of(
        self,
        model: nn.Module,
        source: Source,
        batch: EncodedBatch,
        counts: Mapping[str, float] | None = None,
        progress: float = 0.5,
    ) -> dict[str, Tensor]:
        """The objectives that have a weight on this source, each times its weight.

        Args:
            counts: how many terms each is divided by; those of the batch itself if not given.
            progress: through the stage, in [0, 1].
        """
        weights, divide = source.weights.at(progress), dict(counts or {})
        supervise = "attention" in weights and bool(self.grafts)
        aligned = set(FROM_TEACHER & weights.keys())
        if not self.grafts:
            aligned -= {"reading", "mixing"}
        extra: dict[str, Any] = {}
        if "mixing" in aligned:
            extra["splice_queries"] = every_token(batch)
        elif supervise or "reading" in aligned:
            extra["splice_queries"] = batch.query
        if "hidden" in aligned:
            extra["output_hidden_states"] = True
        base: Tensor | None = None
        with ExitStack() as below, apart(model, batch.documents):
            if "keep" in weights:
                base = self._base_logits(batch)
                if self.prefix is not None:
                    below.enter_context(self.prefix.skipped())
            output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **extra)
        terms: dict[str, Tensor] = {}
        if "answer" in weights:
            terms["answer"] = answer_loss(output.logits, batch, divide.get("answer"))
        if supervise:
            reads, rows = [graft.reads for graft in self.grafts], rows_at_queries(output, aligned, batch)
            terms["attention"] = attention_loss(rows, reads, batch, divide.get("attention"))
        if base is not None:
            terms["keep"] = divergence_loss(output.logits, base, batch, self.distil, divide.get("keep"))
        if "text" in weights:
            terms["text"] = text_loss(output.logits, batch, divide.get("text"))
        if aligned:
            assert self.teacher is not None
            terms |= self._towards_teacher(output, batch, aligned, divide)
        terms = {name: weights[name] * term for name, term in terms.items()}
        if not terms.keys() - {"attention", "reading", "mixing"}:
            terms["none"] = output.logits.sum() * 0  # every parameter takes part, or DDP waits for it
        return terms

    @torch.no_grad()
    def _base_logits(self, batch: EncodedBatch) -> Tensor:
        """(B,T,V) of the frozen base."""
        assert self.base is not None
        with apart(self.base, batch.documents):
            if self.prefix is not None:
                return self.prefix.base_logits(batch.input_ids, batch.attention_mask)
            logits: Tensor = self.base(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        return logits

    def _towards_teacher(
        self, output: Any, batch: EncodedBatch, aligned: set[str], divide: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The unweighted objectives that compare with the teacher."""
        assert self.teacher is not None
        known = self.cache.get(batch) if self.cache is not None and "distil" in aligned else None
        found, terms = self.teacher.outputs(batch, aligned - {"distil"} if known is not None else aligned), {}
        if "distil" in aligned:
            target = self._kept(found.logits, batch) if known is None else known
            terms["distil"] = divergence_loss(output.logits, target, batch, self.distil, divide.get("distil"))
        if "reading" in aligned:
            theirs = [at_queries(x, batch) for x in found.mixing or ()]
            mine = rows_at_queries(output, aligned, batch)
            terms["reading"] = reading_loss(mine, theirs, batch, divide.get("reading"))
        if "mixing" in aligned:
            pairs = (output.splice_attentions, found.mixing)
            terms["mixing"] = mixing_loss(*pairs, batch, divide.get("mixing"))
        if "hidden" in aligned:
            own = self.teacher.student_hidden(output.hidden_states)
            terms["hidden"] = hidden_loss(own, found.hidden, batch, divide.get("hidden"))
        return terms

    def _kept(self, logits_BTV: Tensor, batch: EncodedBatch) -> Tensor | TopK:
        """The teacher's logits, as the cache gives them next time."""
        if self.cache is None:
            return logits_BTV
        assert self.distil.top_k is not None
        self.cache.put(batch, TopK.of(logits_BTV[batch.attention_mask.bool()], self.distil.top_k))
        found = self.cache.get(batch)
        assert found is not None
        return found


def every_token(batch: EncodedBatch) -> Tensor:
    """(B,T) every real token's index; -1 on padding."""
    index = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return index.expand(batch.input_ids.shape).where(batch.attention_mask.bool(), -1)


def rows_at_queries(output: Any, aligned: Collection[str], batch: EncodedBatch) -> Sequence[Tensor]:
    """For each spliced layer, (B,H,Q,T) of the new heads: the pass had the queries' rows, or those of all tokens."""
    rows: Sequence[Tensor] = output.splice_attentions
    return [at_queries(x, batch) for x in rows] if "mixing" in aligned else rows


def at_queries(rows_BHTT: Tensor, batch: EncodedBatch) -> Tensor:
    """(B,H,Q,T) of the rows of all tokens, those of the queries; padded questions take row 0."""
    index = batch.query.clamp(min=0)[:, None, :, None]
    return rows_BHTT.gather(2, index.expand(-1, rows_BHTT.shape[1], -1, rows_BHTT.shape[3]))
