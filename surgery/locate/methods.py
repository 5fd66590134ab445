"""What locating methods take and return. Imports no torch, as plugins with methods import it.

Shape legend: B prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgery.recipe.methods import METHODS, Column, Method, register_method

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surgery.locate.clean_run import CleanRun
    from surgery.probes.documents import Document
    from surgery.recipe import Locate
    from surgery.types import HeadId

__all__ = ["METHODS", "Column", "LocateBatch", "Method", "register_method"]


@dataclass(frozen=True)
class LocateBatch:
    """Input of a locating method: one batch of prompts.

    Attributes:
        run: the clean model on the prompts, with its activations and caches.
        items: sets of heads to change together: single heads and, with `locate.layers`, all heads of a mixer.
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
