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
from itertools import accumulate
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
    lengths = batch.attention_mask.sum(1).tolist()
    width = row_length(max(lengths))
    rows = first_fit(lengths, width)
    index_B1, start_B1 = (torch.zeros(len(batch), 1, dtype=torch.long) for _ in range(2))  # of a document in its row
    for members in rows:
        index_B1[members, 0] = torch.arange(len(members))
        start_B1[members, 0] = torch.tensor([0, *accumulate(lengths[b] for b in members[:-1])])

    def joined(values: Tensor, counts: list[int], least: int, empty: int) -> Tensor:
        """Put the first entries of each document into its row, which has at least `least`."""
        parts = [torch.cat([values[b, : counts[b]] for b in members]) for members in rows]
        packed = values.new_full((len(rows), max(least, *map(len, parts)), *values.shape[2:]), empty)
        for row, part in zip(packed, parts, strict=True):
            row[: len(part)] = part
        return packed

    padding = batch.input_ids[batch.attention_mask == 0][:1].tolist() or [0]
    packed: dict[str, Tensor] = {}
    for name in _TOKENS:
        if (values := getattr(batch, name)) is not None:
            packed[name] = joined(values, lengths, width, padding[0] if name == "input_ids" else 0)
    after = torch.tensor([[len(members)] for members in rows])  # padding is one more document
    documents = joined(index_B1.expand_as(batch.input_ids), lengths, width, 0)
    packed["documents"] = documents.where(packed["attention_mask"].bool(), after).int()
    for names, found in (((*_QUESTIONS, *_VALUES), batch.target), (_READS, batch.read_query)):
        counts = (found >= 0).sum(1).tolist()
        for name in names:
            values = getattr(batch, name)
            moved = values if name in _VALUES else values.where(values < 0, values + start_B1)
            packed[name] = joined(moved, counts, 1, -1)
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
        with torch.random.fork_rng(devices), separate_documents(model, second_BT.int()):
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
