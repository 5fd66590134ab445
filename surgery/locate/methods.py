"""What locating methods take and return. Imports no torch, as plugins with methods import it.

Shape legend: B prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.recipe.methods import METHODS, Column, Method, register_method

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surgery.locate.clean_run import CleanRun
    from surgery.probes.documents import Document
    from surgery.recipe import Locate, Splice
    from surgery.types import HeadId, ScoredHead

__all__ = ["METHODS", "Candidates", "Column", "LocateBatch", "Method", "TrainedScores", "register_method"]


@dataclass(frozen=True)
class LocateBatch:
    """Input of a locating method: one batch of prompts.

    Attributes:
        run: the clean model on the prompts, with its activations and caches.
        items: sets of heads to change together: single heads and, with `locate.layers`, all heads of a mixer. Heads
            that a search has dropped are not included.
        section: the recipe's section `locate`.
        tokenizer: the model's.
        documents: text of the prompts; None if encoded batches were passed to `locate_heads`.
        counterfactual: (B,T) tokens of the prompts with another answer in the place of their own; None if a prompt has
            no place of its answer, or no other answer was found (`surgery.locate.batches.counterfactuals`).
    """

    run: CleanRun
    items: Sequence[tuple[HeadId, ...]]
    section: Locate
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Document] | None
    counterfactual: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """Input of a locating method that trains.

    Attributes:
        model: the base. It must not be changed.
        heads: the heads to train, the best oracle read first, each with the position that it reads.
        section, splice: sections of the recipe.
        seed: the recipe's seed.
        held_out: number of held-out prompts to score on, as many as the other methods measure.
        tick: called after each training step.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: tuple[ScoredHead, ...]
    section: Locate
    splice: Splice
    seed: int
    held_out: int
    tick: Callable[[], None]


@dataclass(frozen=True)
class TrainedScores:
    """Result of a locating method that trains.

    Attributes:
        columns: by column and head, (held-out prompts,) scores. Heads that were not tried are missing.
        passes: work in full forward passes of one prompt.
        steps: training steps of all candidates together.
        chosen: heads in the order in which they were chosen, if the method chooses several together. By default the
            ranking decides.
    """

    columns: Mapping[str, Mapping[HeadId, NDArray[Any]]]
    passes: float
    steps: int
    chosen: tuple[ScoredHead, ...] = ()
