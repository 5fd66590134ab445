"""Several documents a row, in a forward pass. Owns: how a model is told, and whether it keeps them apart.

Must never know: losses, optimizers, how documents are put together (`train/row_packing.py`). Scans take `seq_idx` where
there are the kernels of mamba_ssm and causal_conv1d; attention sees where documents begin by its positions.

Shape legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.hybrid.model import HybridModelMixin
from surgery.hybrid.packing import packed_masks, positions_of
from surgery.models.lookup import family_of

_APART = 1e-5  # of logits that nothing but a leak can change, relative; equal shapes are computed alike


@contextmanager
def apart(model: nn.Module, documents_BT: Tensor | None) -> Iterator[None]:
    """In the forward passes inside, a row's documents do not see one another.

    What is said goes to the model without its head: some causal language models of transformers hand nothing on.
    Padding is one more document, so no mask reaches it.

    Args:
        model: may be wrapped, as for several processes.
        documents_BT: as of `EncodedBatch`; None where every document has its own row.
    """
    if documents_BT is None:
        yield
        return
    body = _inner(model).base_model
    given = _said(body, documents_BT)

    def hand(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, **given}

    handle = body.register_forward_pre_hook(hand, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _inner(model: nn.Module) -> PreTrainedModel:
    """The model inside of what Accelerate wraps around it."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _said(body: nn.Module, documents_BT: Tensor) -> dict[str, Any]:
    """The keyword arguments by which a model without its head keeps documents apart."""
    if isinstance(body, HybridModelMixin):  # it makes the rest of it
        return {"attention_mask": None, "seq_idx": documents_BT}
    family, positions_BT = family_of(body.config), positions_of(documents_BT)
    if family.cache_argument == "cache_params":
        return {"attention_mask": None, "seq_idx": documents_BT}
    if not any(spec.is_ssm for spec in family.mixers(body.config)):
        return {"attention_mask": None, "position_ids": positions_BT}
    like = {"dtype": body.get_input_embeddings().weight.dtype, "device": documents_BT.device}
    embeds_BTD = torch.empty(*documents_BT.shape, 0, **like)  # no number of it is read
    masks = packed_masks(body.config, embeds_BTD, positions_BT)
    return {"attention_mask": masks, "position_ids": positions_BT, "seq_idx": documents_BT}


def why_not(models: Mapping[str, nn.Module]) -> str | None:
    """Why documents cannot share a row; None if they can in every one of these models.

    Nothing is looked up in a table: each model runs twice on two short rows of two documents, and the second documents'
    logits have to stay when the first ones are others.
    """
    for name, model in models.items():
        try:
            leaks = _leaks(model)
        except (ValueError, RuntimeError) as error:  # each kernel has its own way to say what it cannot
            return f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        if leaks:
            return f"{name}: a document changes what is said of the next one in its row"
    return None


@torch.no_grad()
def _leaks(model: nn.Module) -> bool:
    """Whether a document's logits change with the one before it; the rows are longer than two chunks of a scan."""
    parameter = next(model.parameters())
    config = _inner(model).config
    chunk = getattr(config, "chunk_size", None) or getattr(config, "mamba_chunk_size", None) or 8
    T, ends = 2 * chunk + 8, (chunk, chunk + chunk // 2 + 1)
    index_T = torch.arange(T, device=parameter.device)
    second_BT = index_T >= torch.tensor(ends, device=parameter.device)[:, None]
    ids_BT = (index_T % (config.vocab_size - 1)).expand(2, T)
    found = []
    for shift in (0, 1):
        with torch.random.fork_rng([parameter.device] if parameter.is_cuda else []), apart(model, second_BT.int()):
            torch.manual_seed(0)  # of adapters' dropout
            shifted_BT = ids_BT.where(second_BT, ids_BT + shift)
            logits = model(shifted_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False).logits
        found.append(logits[second_BT].float())
    return not torch.allclose(*found, rtol=0, atol=_APART * float(found[0].abs().max()))
