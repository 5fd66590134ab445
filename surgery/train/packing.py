"""Packing: put several documents into one row of a batch.

`pack` puts the documents of a batch into fewer rows. `separate_documents` keeps them separate in a forward pass: scans
get `seq_idx`, which the kernels of mamba_ssm and causal_conv1d take, and our scans in PyTorch inside `torch_scans`;
attention gets positions that restart at each document. `packing_fault` tests whether a model keeps documents separate.
`trimmed` selects from a batch.

Shape legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.hybrid.modeling_hybrid import HybridModelMixin, packed_masks, positions_of
from surgery.models.lookup import family_of
from surgery.models.torch_scans import torch_scans

_TOKENS = ("input_ids", "attention_mask", "answers", "sources")
_QUESTIONS = ("query", "segment_start", "segment_end", "answer_token")  # indices into T
_READS = ("read_query", "read_segment_end", "read_answer_token")  # indices into T
_VALUES = ("target", "gold", "choice_ids", "choice_rest")
# Relative difference of logits that rounding may make. Kernels multiply in tf32: up to 3e-3 in fp32, and 3e-2 in bf16
# (mamba2-24m, H100). A leak changes them by .14 and more.
_ROUNDING = 0.1


def row_length(tokens: int) -> int:
    """Round up to one of four lengths an octave, so that kernels are tuned and compiled for few shapes."""
    step = max(16, 2 ** (tokens.bit_length() - 3))
    return -(-tokens // step) * step


def first_fit(lengths: Sequence[int], longest: int) -> list[list[int]]:
    """Assign documents of these lengths to rows of `longest` tokens by first-fit decreasing: indices for each row.

    The result has at most 11/9 of the minimum number of rows, plus 2/3 (Dosa, 2007).
    """
    rows, room = list[list[int]](), list[int]()
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((i for i, left in enumerate(room) if left >= lengths[document]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(longest)
        rows[row].append(document)
        room[row] -= lengths[document]
    return rows


def pack(batch: EncodedBatch) -> EncodedBatch:
    """Put the documents of a right-padded batch, one a row, into fewer rows of one length: that of `row_length`."""
    real_BT = batch.attention_mask.bool()
    lengths_B = real_BT.sum(1)
    width = row_length(int(lengths_B.max()))
    rows = first_fit(lengths_B.tolist(), width)
    order_B = torch.tensor([b for members in rows for b in members])  # row by row
    row_B, index_B = torch.empty_like(order_B), torch.empty_like(order_B)
    row_B[order_B] = torch.tensor([row for row, members in enumerate(rows) for _ in members])
    index_B[order_B] = torch.tensor([index for members in rows for index in range(len(members))])

    def place(counts_B: Tensor) -> tuple[Tensor, int]:
        """Return the first place of each document's entries in its row, and the most entries of a row."""
        ends_B = counts_B[order_B].cumsum(0)
        sizes_R = torch.zeros(len(rows), dtype=torch.long).index_add_(0, row_B, counts_B)
        start_B = torch.empty_like(counts_B)
        start_B[order_B] = ends_B - counts_B[order_B] - (sizes_R.cumsum(0) - sizes_R)[row_B[order_B]]
        return start_B, int(sizes_R.max())

    starts_B, _ = place(lengths_B)
    packed: dict[str, Tensor] = {}
    document, token = real_BT.nonzero(as_tuple=True)
    there = row_B[document], starts_B[document] + token
    for name in _TOKENS:
        values = getattr(batch, name)
        if values is not None:
            packed[name] = values.new_zeros(len(rows), width)
            packed[name][there] = values[real_BT]
    padding = batch.input_ids[batch.attention_mask == 0]
    packed["input_ids"] += (int(padding[0]) if len(padding) else 0) * (packed["attention_mask"] == 0)
    packed["documents"] = torch.tensor([[len(members)] for members in rows], dtype=torch.int32).repeat(1, width)
    packed["documents"][there] = index_B[document].int()
    for names, found in (((*_QUESTIONS, *_VALUES), batch.target), (_READS, batch.read_query)):
        counts_B = (found >= 0).sum(1)
        first_B, most = place(counts_B)
        document, entry = (torch.arange(found.shape[1]) < counts_B[:, None]).nonzero(as_tuple=True)
        there = row_B[document], first_B[document] + entry
        for name in names:
            values = getattr(batch, name)
            packed[name] = values.new_full((len(rows), max(1, most), *values.shape[2:]), -1)
            taken = values[document, entry]
            moved = taken if name in _VALUES else taken.where(taken < 0, taken + starts_B[document])
            packed[name][there] = moved
    return EncodedBatch(**packed)


@contextmanager
def separate_documents(model: nn.Module, documents_BT: Tensor | None) -> Iterator[None]:
    """Keep the documents of a row (`EncodedBatch.documents`) separate in all forward passes inside. None does nothing.

    The arguments are passed to the model below the language modelling head, since some causal language models of
    transformers do not forward them. Padding is treated as one more document instead of being masked.
    """
    if documents_BT is None:
        yield
        return
    body = _unwrapped(model).base_model
    arguments = _packing_arguments(body, documents_BT)
    handle = body.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, **arguments}), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model that Accelerate may have wrapped."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _packing_arguments(body: nn.Module, documents_BT: Tensor) -> dict[str, Any]:
    """Keyword arguments with which a model without its head keeps documents separate."""
    if isinstance(body, HybridModelMixin):  # it makes masks and positions itself
        return {"attention_mask": None, "seq_idx": documents_BT}
    family, positions_BT = family_of(body.config), positions_of(documents_BT)
    if not family.reads_positions:
        return {"attention_mask": None, "seq_idx": documents_BT}
    if not any(spec.is_ssm for spec in family.mixers(body.config)):
        return {"attention_mask": None, "position_ids": positions_BT}
    like = {"dtype": body.get_input_embeddings().weight.dtype, "device": documents_BT.device}
    embeds_BTD = torch.empty(*documents_BT.shape, 0, **like)  # only its shape, dtype and device are read
    masks = packed_masks(body.config, embeds_BTD, positions_BT)
    return {"attention_mask": masks, "position_ids": positions_BT, "seq_idx": documents_BT}


def packing_fault(models: Mapping[str, nn.Module]) -> str | None:
    """Test that models keep the documents of a row separate. Return the reason if one does not, with its name."""
    for name, model in models.items():
        try:
            inner = _unwrapped(model)
            with torch_scans(inner):
                body = inner.base_model
                if isinstance(body, HybridModelMixin) and not body.keeps_apart(inner.device.type == "cuda"):
                    return f"{name}: the scan of {inner.config.model_type} takes no seq_idx"
                leaks = _leaks(model)
        except (ValueError, RuntimeError) as error:  # kernels raise either for arguments that they do not support
            return f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        if leaks:
            return f"{name}: a document changes the logits of the next one in its row"
    return None


@torch.no_grad()
def _leaks(model: nn.Module) -> bool:
    """True if a document's logits depend on the document before it.

    The model runs twice on two rows of two documents, longer than two chunks of a scan. The logits of the second
    documents must not change if the first documents do.
    """
    parameter = next(model.parameters())
    config = _unwrapped(model).config
    chunk = getattr(config, "chunk_size", None) or getattr(config, "mamba_chunk_size", None) or 8
    T, ends = 2 * chunk + 8, (chunk, chunk + chunk // 2 + 1)
    index_T = torch.arange(T, device=parameter.device)
    second_BT = index_T >= torch.tensor(ends, device=parameter.device)[:, None]
    ids_BT = (index_T % (config.vocab_size - 1)).expand(2, T)
    devices = [parameter.device] if parameter.is_cuda else []
    logits_by_shift = []
    for shift in (0, 1):
        with (
            torch.random.fork_rng(devices),
            separate_documents(model, second_BT.int()),
        ):
            torch.manual_seed(0)  # for the dropout of adapters
            ids = ids_BT.where(second_BT, ids_BT + shift)
            output = model(ids, attention_mask=torch.ones_like(ids_BT), use_cache=False)
        logits_by_shift.append(output.logits[second_BT].float())
    apart, changed = logits_by_shift
    return float((apart - changed).abs().max()) > _ROUNDING * float(apart.abs().max())


def trimmed(batch: EncodedBatch) -> EncodedBatch:
    """Cut the columns at the right that hold only padding, of tokens, questions and reads."""
    tokens = int(batch.attention_mask.sum(1).max()) if batch.documents is None else batch.input_ids.shape[1]
    questions, reads = (max(1, int((x >= 0).sum(1).max())) for x in (batch.target, batch.read_query))
    widths = {
        **dict.fromkeys(_TOKENS, tokens),
        **dict.fromkeys((*_QUESTIONS, *_VALUES), questions),
        **dict.fromkeys(_READS, reads),
    }
    cut = {name: getattr(batch, name)[:, :width] for name, width in widths.items() if getattr(batch, name) is not None}
    return replace(batch, **cut)
