"""Softmax attention heads beside the SSM mixers of a language model: all that the families of hybrids share.

A hybrid mixer computes `ssm(u) + attention(u)`. The family's own mixer runs as it is, so scans, kernels and parameter
names stay. The branch `attention` has the form of the SSM head that it copies (C is its query, B its key, x its value;
arXiv 2405.21060): softmax attention without positions, a short causal convolution, a gate, and an RMSNorm of each head.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, D model width, I inner width, C channels, H
heads, G key/value heads, K query/key width, V value width, Q requested rows, N documents of L tokens.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache as cached
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig
from transformers import initialization as init
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward, rotate_half
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs
from transformers.utils.versions import require_version

from .configuration_hybrid import FLAG, Check, at_least, register_branch, splice_sites, wrong

logger = logging.get_logger(__name__)

require_version("transformers>=5.24,<6", "This hybrid checkpoint needs it: pip install 'transformers>=5.24,<6'.")
NEWEST_TESTED = "5.24"
if [int(n) for n in transformers.__version__.split(".")[:2]] > [int(n) for n in NEWEST_TESTED.split(".")]:
    logger.warning(
        f"The hybrid's code was tested with transformers {NEWEST_TESTED}, and {transformers.__version__} is installed. "
        f"If loading or generating fails: pip install 'transformers=={NEWEST_TESTED}.*'."
    )

CONV_STATE = 1  # index of the branch's convolution state in the cache; state 0 is the SSM's
IN_FP32 = {"A_log", "dt_bias", "D"}  # parameters of the recurrence, also in a model of half precision


# Cache ---------------------------------------------------------------------------------------------------------------

ROOM = 64  # tokens that a new buffer has room for, at least; a quarter of its tokens if that is more


@dataclass
class Buffer:
    """Rows (B,G,rows,K+V), and the views that show the tokens in them: keys (B,G,S,K) and values (B,G,S,V)."""

    rows: Tensor
    keys: Tensor
    values: Tensor


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` that writes new keys and values behind the old ones, instead of copying all at every token.

    The buffer is append-only: what a view shows is never written again. A layer that does not hold the buffer's views
    (reordered, cropped, set by somebody, or a copy whose original went on) takes a new buffer at its next token.
    """

    buffer: Buffer | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B,G,T,K) and (B,G,T,V); return the keys and values of all tokens, (B,G,S,K) and (B,G,S,V).

        The first tokens are kept as they are, since not every prompt is continued. Tensors that may need gradients are
        concatenated, and so are those of a compiled pass.
        """
        tensors = (key_states, value_states, self.keys, self.values)
        if torch.compiler.is_compiling() or self.get_seq_length() == 0 or len({x.dtype for x in tensors}) > 1:
            return super().update(key_states, value_states, *args, **kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return super().update(key_states, value_states, *args, **kwargs)
        (B, G, old, K), S, own = self.keys.shape, self.keys.shape[2] + key_states.shape[2], self.buffer
        fits = own is not None and own.keys is self.keys and own.values is self.values and own.rows.shape[2] >= S
        if own is None or not fits or (own.rows.is_inference() and not torch.is_inference_mode_enabled()):
            rows = self.keys.new_empty(B, G, S + max(ROOM, S // 4), K + self.values.shape[-1])
            rows[:, :, :old, :K], rows[:, :, :old, K:] = self.keys, self.values
            own = self.buffer = Buffer(rows, self.keys, self.values)
        own.rows[:, :, old:S, :K], own.rows[:, :, old:S, K:] = key_states, value_states
        own.keys, own.values = own.rows[:, :, :S, :K], own.rows[:, :, :S, K:]
        self.keys, self.values = own.keys, own.values
        return self.keys, self.values


class GrowingHybridLayer(GrowingLayer, LinearAttentionAndFullAttentionLayer):
    """The same for a layer that has the states of an SSM too."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers'; with one more token, (B,C,1), the state (B,C,width) is the tensor that is returned."""
        continues = conv_states.shape[-1] == 1 and self.has_previous_state[state_idx] and not self.record_past
        if not continues or torch.compiler.is_compiling():
            return super().update_conv_state(conv_states, state_idx=state_idx, **kwargs)
        self.conv_states[state_idx] = torch.cat([self.conv_states[state_idx][..., 1:], conv_states], dim=-1)
        return self.conv_states[state_idx]


def let_grow(cache: Any) -> None:
    """Replace the empty layers of a `DynamicCache` that will keep all keys and values.

    Other caches stay as they are. So do offloaded ones, whose keys change places.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        return
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = GrowingLayer()
        elif type(layer) is LinearAttentionAndFullAttentionLayer and layer.device is None and not layer.record_past:
            cache.layers[index] = GrowingHybridLayer(layer.number_of_states)


# Kernels -------------------------------------------------------------------------------------------------------------

# Functions of transformers' modelling files, and what the kernel of each imports. mamba_ssm's fused training functions
# call causal_conv1d, which it does not require.
_UPDATE = "mamba_ssm.ops.triton.selective_state_update"
KERNELS = {
    "causal_conv1d_fn": ("causal_conv1d",),
    "causal_conv1d_update": ("causal_conv1d",),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"),
    "mamba2_chunk_scan": ("mamba_ssm.ops.triton.ssd_combined",),
    "mamba2_selective_state_update": (_UPDATE,),
    "mamba_inner_fn": ("mamba_ssm.ops.selective_scan_interface", "causal_conv1d"),
    "mamba_selective_scan": ("mamba_ssm.ops.selective_scan_interface",),
    "mamba_selective_state_update": (_UPDATE,),
}
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# Tokens in a chunk of the PyTorch scan of Mamba-2, at most. It makes a tensor of tokens x chunk x heads x state. The
# result is the same up to rounding.
TORCH_CHUNK = 32


@cached
def has_kernel(name: str) -> bool:
    """Return whether the packages for a key of `KERNELS` can be imported."""
    try:
        return all(map(import_module, KERNELS[name]))
    except Exception:  # a package that was built for another torch raises any
        return False


def kernels_by_device(*classes: type) -> list[Any]:
    """Choose by device in the modelling files of these classes: kernels for CUDA tensors, PyTorch for all others.

    transformers takes a kernel wherever its package can be imported, and the kernels refuse other tensors. This
    replaces functions of transformers, once, so it holds for other models of the same files too. Returns the files.
    """
    files = {base.__module__ for cls in classes for base in cls.__mro__}
    modules = [sys.modules[file] for file in sorted(files) if file in sys.modules]
    for module in modules:
        for name in KERNELS:
            function: Any = getattr(module, name, None)
            code: Any = function
            if isinstance(code, nn.Module):  # with the package `kernels`, the wrapper is inside the forward of a module
                cells = type(code).forward.__closure__ or ()
                code = next((c.cell_contents for c in cells if hasattr(c.cell_contents, "__wrapped__")), None)
            code = getattr(code, "__wrapped__", None)
            if code is not None and not hasattr(function, "has_kernel"):
                setattr(module, name, _by_device(name, function, code))
    return modules


def _by_device(name: str, function: Callable[..., Any], code: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes `function`, transformers' choice, for CUDA tensors, and the PyTorch `code` for all others."""
    known = frozenset(inspect.signature(code).parameters)

    @wraps(code)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # `use_kernels` sets the forward of the module that stands for the function.
        from_hub = isinstance(function, nn.Module) and function.forward.__func__ is not type(function).forward
        runs_kernel = tensor.is_cuda and (call.has_kernel or from_hub)
        if name in FUSED and not runs_kernel:
            return None  # the mixer then calls its parts
        if "chunk_size" in kwargs and not runs_kernel:
            kwargs["chunk_size"] = min(kwargs["chunk_size"], TORCH_CHUNK)
        if tensor.is_cuda:  # without a kernel, transformers refuses `seq_idx` and says once what to install
            return function(tensor, *args, **kwargs)
        if kwargs.get("seq_idx") is not None:
            hint = f"its kernel needs CUDA tensors, not {tensor.device.type}"
            raise ValueError(f"seq_idx: {name} can't keep packed sequences apart ({hint}). Give every text a row.")
        return code(tensor, *args, **{key: value for key, value in kwargs.items() if key in known})

    call.has_kernel = has_kernel(name)  # type: ignore[attr-defined]
    return call


def functions_of(cls: type, *names: str) -> list[Any]:
    """Return these functions of the modelling files of a class, if a file has all of them."""
    files = [sys.modules[base.__module__] for base in cls.__mro__]
    return [getattr(file, name) for file in files if all(hasattr(file, n) for n in names) for name in names]


# Documents -----------------------------------------------------------------------------------------------------------

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # as flash attention's callers pass them


def begins_of(seq_idx_BT: Tensor) -> Tensor:
    """Return (B,T) bool: whether a token is the first one of its document. False for the first token of a row."""
    return F.pad(seq_idx_BT[:, 1:] != seq_idx_BT[:, :-1], (1, 0))


def positions_of(documents_BT: Tensor) -> Tensor:
    """Return (B,T): how many tokens of its document come before each token."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand(documents_BT.shape)
    return index_BT - index_BT.where(begins_of(documents_BT), 0).cummax(1).values


def marked_documents(given: Mapping[str, Any], seq_idx: Tensor | None, embeds: Tensor, mask: Any) -> Tensor | None:
    """Return (B,T) int32, the index of the document that each token belongs to; None if each row holds one.

    Documents are marked by `seq_idx`, by `cu_seq_lens_q`, or by positions that start again. Where padding begins or
    ends, a document does too, so the result replaces a padding mask.

    Args:
        given: keyword arguments of the forward pass; `BORDERS` and `position_ids` are read.
        embeds: (B,T,D); only its shape and device are read.
        mask: the padding mask (B,S), or masks by kind of layer. Positions on padding mark nothing.

    Raises:
        ValueError: two marks contradict, or one has a wrong shape.
    """
    shape, begins_BT = embeds.shape[:2], None
    if seq_idx is not None:
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx: {tuple(seq_idx.shape)}. It needs one index a token, {tuple(shape)}.")
        begins_BT = begins_of(seq_idx)
    if any(given.get(name) is not None for name in BORDERS):
        by_length_BT = _begins_by_length(given, shape, embeds.device)
        if begins_BT is not None and not torch.equal(begins_BT, by_length_BT):
            raise ValueError("cu_seq_lens_q: it marks other documents than seq_idx. Pass one of them.")
        begins_BT = by_length_BT
    positions = given.get("position_ids")
    if positions is not None and shape[1] > 1:
        again_BT = F.pad(positions[..., 1:] <= positions[..., :-1], (1, 0)).expand(shape)
        real = mask.get("linear_attention") if isinstance(mask, Mapping) else mask
        if begins_BT is not None:
            if not torch.equal(again_BT, begins_BT):
                raise ValueError("position_ids: with seq_idx they start at 0 in every document. Do not pass them.")
        else:
            if isinstance(real, Tensor) and real.ndim == 2:
                real_BT = real[:, -shape[1] :].bool()
                again_BT = again_BT & real_BT & F.pad(real_BT[:, :-1], (1, 0))
            if torch.compiler.is_compiling():  # a graph cannot depend on the positions
                hint = "position_ids: they start again. Pass seq_idx to a compiled model."
                torch._assert_async(~again_BT.any(), hint)
            elif again_BT.any():
                begins_BT = again_BT
    if begins_BT is None:
        return None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError("attention_mask: with several documents in a row it needs to be (B,T), or None.")
        begins_BT = begins_BT | begins_of(mask)
    return begins_BT.cumsum(1).to(torch.int32)


def _begins_by_length(given: Mapping[str, Any], shape: torch.Size, device: torch.device) -> Tensor:
    """Return (B,T) bool as `begins_of`, by the first tokens of the documents in all rows. Raises ValueError."""
    lengths = {name: given[name] for name in BORDERS if given.get(name) is not None}
    if "cu_seq_lens_q" not in lengths:
        raise ValueError(f"{next(iter(lengths))}: it says nothing without cu_seq_lens_q. Pass both.")
    hint = f"It needs to go from 0 to the number of tokens, {shape.numel()}, and to equal cu_seq_lens_k."
    try:
        starts, ends = (torch.as_tensor(lengths.get(k, lengths[BORDERS[0]]), device=device) for k in BORDERS[:2])
        fits = starts[0] == 0 and starts[-1] == shape.numel() and starts.ndim == 1 and torch.equal(starts, ends)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"cu_seq_lens_q: {error}. {hint}") from None
    if not fits:
        raise ValueError(f"cu_seq_lens_q: {starts.tolist()}. {hint}")
    at_start = torch.zeros(shape.numel() + 1, dtype=torch.bool, device=device)
    at_start[starts.long()] = True
    begins_BT = at_start[:-1].view(shape)
    begins_BT[:, 0] = False
    return begins_BT


class Unpacked:
    """The documents of packed rows as rows of their own, for scans that do not keep the documents of a row apart.

    Attributes:
        groups: (N,L) places of the tokens in the flat rows, and (N,L) bool, False on padding at the right. Documents of
            one token, such as padding that positions mark by zeros, are a group of their own.
    """

    def __init__(self, documents_BT: Tensor) -> None:
        self.shape, begins_BT = documents_BT.shape, begins_of(documents_BT)
        begins_BT[:, 0] = True
        starts_N = begins_BT.flatten().nonzero()[:, 0]
        lengths_N = starts_N.diff(append=starts_N.new_tensor([begins_BT.numel()]))
        self.groups = []
        for chosen_N in (lengths_N > 1, lengths_N == 1):
            if chosen_N.any():
                index_L = torch.arange(int(lengths_N[chosen_N].max()), device=documents_BT.device)
                real_NL = index_L < lengths_N[chosen_N, None]
                first_N1 = starts_N[chosen_N, None]
                self.groups.append(((first_N1 + index_L).where(real_NL, first_N1), real_NL))

    def split(self, x_BTD: Tensor, place_NL: Tensor) -> Tensor:
        """(B or 1,T,...) -> (N,L,...)."""
        return x_BTD.expand(*self.shape, *x_BTD.shape[2:]).flatten(0, 1)[place_NL]

    def joined(self, outputs: list[Any]) -> dict[str, Any]:
        """Return the output of a model, given the outputs of the groups. The cache is None."""
        values = {name: [o[name] for o in outputs] for name, v in outputs[0].items() if v is not None}
        return {
            name: tuple(map(self._join, zip(*parts, strict=True))) if isinstance(parts[0], tuple) else self._join(parts)
            for name, parts in values.items()
        }

    def _join(self, parts: Iterable[Tensor]) -> Tensor:
        """(N,L,...) of each group -> (B,T,...); a router's logits (N L,...) -> (B T,...)."""
        real, places, is_flat = [], [], False
        for part, (place_NL, real_NL) in zip(parts, self.groups, strict=True):
            is_flat = part.shape[:2] != real_NL.shape
            real.append(part[real_NL.flatten() if is_flat else real_NL])
            places.append(place_NL[real_NL])
        x_XD = torch.cat(real)[torch.cat(places).argsort()]
        return x_XD if is_flat else x_XD.unflatten(0, self.shape)


def packed_masks(config: Any, embeds_BTD: Tensor, positions_BT: Tensor) -> dict[str, Any]:
    """Return the masks of rows of several documents by kind of layer, as families with several kinds take them.

    Attention's is block-diagonal; scans use `seq_idx` instead. Not all families make these masks from positions.
    """
    causal = create_causal_mask(config, embeds_BTD, None, None, position_ids=positions_BT)
    return {"full_attention": causal, "linear_attention": None}


def masked(x_BTC: Tensor, padding_mask_BT: Tensor | None) -> Tensor:
    """Return `x_BTC` with 0 on padding."""
    return x_BTC if padding_mask_BT is None else x_BTC * padding_mask_BT[:, :, None].to(x_BTC.dtype)


def convolved(conv1d: nn.Module, kernel: int, x_BCT: Tensor, length: int, documents_BT: Tensor | None = None) -> Tensor:
    """Return the last `length` outputs of a causal convolution, with zeros before a text or a document.

    It calls the module, so that hooks which load offloaded weights run.
    """
    past = kernel - 1
    if length == 1 and x_BCT.shape[-1] > past:  # one new token after a cache: its inputs are all there
        return conv1d(x_BCT[..., -kernel:])
    if documents_BT is None:
        return conv1d(F.pad(x_BCT, (past, 0)))[..., -length:]
    place_BT = torch.arange(length, device=x_BCT.device) + past * (documents_BT.long() + 1)
    place_BCT = place_BT[:, None].expand(x_BCT.shape)
    spaced_BCS = x_BCT.new_zeros(*x_BCT.shape[:2], int(place_BT.max()) + 1).scatter(2, place_BCT, x_BCT)
    return conv1d(spaced_BCS).gather(2, place_BCT - past)


class SpliceRows:
    """Collect the attention rows of chosen query tokens, for attention supervision.

    One object travels down one forward pass, and each spliced layer adds its rows. It closes when the pass ends:
    gradient checkpointing computes the rows again, and they must not be stored twice.

    Args:
        queries_BQ: (B,Q) token indices, -1 where there is none.
        documents: (B,T) index of the document that each token belongs to; None where a row holds one document.
    """

    def __init__(self, queries_BQ: Tensor, documents: Tensor | None = None) -> None:
        self.queries_BQ, self.documents = queries_BQ, documents
        self._rows: dict[int, Tensor] | None = {}

    def collect(self, layer: int, query_BHTK: Tensor, key_BHTK: Tensor, padding: Any) -> None:
        """Compute the softmax rows (B,H,Q,T) of this layer in fp32."""
        index_BQ = self.queries_BQ.clamp(min=0)
        rows_BHQK = query_BHTK.gather(
            2, index_BQ[:, None, :, None].expand(-1, query_BHTK.shape[1], -1, query_BHTK.shape[3])
        )
        device = rows_BHQK.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            scores = rows_BHQK.float() @ key_BHTK.float().transpose(2, 3)
        seen_BQT = torch.arange(key_BHTK.shape[2], device=scores.device) <= index_BQ[..., None]
        if padding is not None:
            seen_BQT = seen_BQT & padding[:, None, :].bool()
        if self.documents is not None:
            seen_BQT = seen_BQT & (self.documents.gather(1, index_BQ)[..., None] == self.documents[:, None, :])
        scores = scores.masked_fill(~seen_BQT[:, None], torch.finfo(scores.dtype).min)
        rows_BHQT = torch.where((self.queries_BQ >= 0)[:, None, :, None], scores.softmax(-1), 0.0)
        if self._rows is not None:
            self._rows[layer] = rows_BHQT

    def take(self) -> tuple[Tensor, ...]:
        """Return the rows by layer, from below, and close the collection."""
        rows, self._rows = self._rows or {}, None
        return tuple(rows[layer] for layer in sorted(rows))


@dataclass
class SplicePass:
    """The inputs that one forward pass gives to all its spliced layers.

    Attributes:
        padding: (B,T) of the new tokens, 0 on padding; None where there is none.
        causal: the mask of transformers' `create_causal_mask`.
        rows: collects attention rows, or None.
        positions: (B or 1,T) of the new tokens, if a branch reads them.
        documents: (B,T) index of the document that each token belongs to; None where a row holds one document.
    """

    padding: Tensor | None = None
    causal: Any = None
    rows: SpliceRows | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None


# Attention -----------------------------------------------------------------------------------------------------------


def is_decoding(x_BTD: Tensor) -> bool:
    """Return whether this is one new token without gradients: what counts then is the number of operators."""
    return x_BTD.shape[1] == 1 and not torch.is_grad_enabled()


def is_plain(module: nn.Module) -> bool:
    """Return whether nothing waits for a call of the module: no hook, and no other `forward` than its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def projected(linear: nn.Module, x_BTC: Tensor, onto_BTD: Tensor | None) -> Tensor:
    """Return `onto_BTD + linear(x_BTC)`; in one operator where `linear` is as torch has it, without a bias."""
    if onto_BTD is None:
        return linear(x_BTC)
    takes_part = type(linear) is nn.Linear and linear.bias is None and type(linear.weight) is nn.Parameter
    if takes_part and is_plain(linear) and x_BTC.dtype == onto_BTD.dtype == linear.weight.dtype:
        return torch.addmm(onto_BTD.flatten(0, 1), x_BTC.flatten(0, 1), linear.weight.t()).view(onto_BTD.shape)
    return onto_BTD + linear(x_BTC)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Mix values: (B,H,T,K), (B,G,S,K), (B,G,S,V) -> (B,T,H,V), and the weights (B,H,T,S) of eager attention.

    Args:
        module: has the `config` that selects the implementation, `num_key_value_groups` and `is_causal`.
        mask: as made by transformers' `create_causal_mask`; None where every query sees itself and what is before it.
        scaling: factor of the scores.
    """
    implementation, value_width = module.config._attn_implementation, value.shape[-1]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    if query.shape[2] == 1 and function in (sdpa_attention_forward, eager_attention_forward):
        return _attend_once(query, key, value, mask, scaling, fused=function is sdpa_attention_forward)
    if "flash" in implementation or (implementation == "sdpa" and query.shape[2] > 1):
        # Fused kernels take keys and values of one width. Zeros change no score; the output is cropped.
        width = max(key.shape[-1], value_width)
        query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    with without_cudnn() if function is sdpa_attention_forward and query.is_cuda else nullcontext():
        mixed_BTHV, weights = function(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    return mixed_BTHV[..., :value_width], weights


def _attend_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, fused: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with one query a head. Queries that share keys are the rows of one product.

    Args:
        fused: whether one operator may do it, which returns no weights. On a CPU it takes keys and values of one width.
            On a GPU, choosing a kernel takes longer than the two more operators.
    """
    (B, H, _, K), G, V = query.shape, key.shape[1], value.shape[-1]
    query_BGRK = query.reshape(B, G, H // G, K)
    if fused and mask is None and query.is_cpu and K == V:
        return F.scaled_dot_product_attention(query_BGRK, key, value, scale=scaling).reshape(B, 1, H, V), None
    scores_BGRS = (query_BGRK if scaling == 1.0 else query_BGRK * scaling) @ key.transpose(2, 3)
    if mask is not None:
        mask = mask if mask.shape[1] == 1 else mask.reshape(B, G, H // G, -1)
        if mask.dtype == torch.bool:
            scores_BGRS = torch.where(mask, scores_BGRS, torch.finfo(scores_BGRS.dtype).min)
        else:
            scores_BGRS = scores_BGRS + mask
    weights_BGRS = scores_BGRS.softmax(-1).to(query.dtype)  # computed in fp32 whatever the dtype
    return (weights_BGRS @ value).reshape(B, 1, H, V), weights_BGRS.reshape(B, H, 1, -1)


def without_cudnn() -> AbstractContextManager[None]:
    """Leave out the backend that makes a plan for every length, which takes longer than the attention.

    The choice among the others stays the user's, and so does cuDNN where it is the only one.
    """
    others = _other_backends()
    return sdpa_kernel(others) if others else nullcontext()


@torch.compiler.assume_constant_result
def _other_backends() -> list[SDPBackend]:
    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return [backend for backend, is_on in enabled.items() if is_on]


@register_branch("ssm")
class SplicedAttention(nn.Module):
    """The attention heads of one layer, as copies of SSM heads; the base class of every branch.

    A subclass under `@register_branch(NAME)` is a new kind of branch, built where an entry's `init` is NAME. It may
    override the class attributes and the methods without an underscore.

    Args:
        config: the hybrid's config; `hidden_size` and `_attn_implementation` are read.
        site: this layer's entry of `config.splice`: `heads`, `mode`, `qk_width`, `v_width`, `activation` (`silu` or
            None), `gate`, `bias`, `norm_eps` and the keys of `fields`; `gate_bias` where the gate has one of its own;
            `copied_width` where only the first channels of query and key are copies.
        layer_idx: index of the layer, which is also its slot in the cache.

    Attributes:
        fields: entries of `site` that this kind needs, with the check of each, beside those of every branch.
        equal_widths: fields of `site` that have to equal the width of the model's heads.
        unit_scale: whether queries start unscaled, as the linear attention does that SSM heads are; else 1/sqrt(K).
        needs_teacher: whether it is built from a Transformer (`splice.teacher`).
        reads_streams: whether it reads the input and the output of the mixer's `x_proj`.
        reads_positions: whether it reads the positions of the tokens.
    """

    fields: Mapping[str, Check] = {"conv_kernel": at_least(1), "conv_bias": FLAG}
    equal_widths: tuple[str, ...] = ("head_dim",)
    unit_scale = True
    needs_teacher = False
    reads_streams = False
    reads_positions = False

    is_causal = True
    num_key_value_groups = 1

    @classmethod
    def check_site(cls, name: str, site: Mapping[str, Any]) -> None:
        """Check what fields say together; `name` is that of the entry, such as `splice[0]`. Raises ValueError."""
        if site.get("copied_width", 1) > site["qk_width"]:
            accepted = f"{site['qk_width']} or less, the width of query and key"
            raise wrong(f"{name}.copied_width", site["copied_width"], accepted)

    @classmethod
    def plan_fields(cls, source: Any) -> dict[str, Any]:
        """Return the fields of `site` that this kind decides; `source`, of the library that splices, knows the base."""
        return source.plan_fields(cls)

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.qk_width, self.v_width = len(site["heads"]), site["qk_width"], site["v_width"]
        self.copied_width = site.get("copied_width", self.qk_width)
        self.conv_kernel, self.mode, self.silu = site["conv_kernel"], site["mode"], site["activation"] == "silu"
        self.norm_eps = site["norm_eps"]
        self.initial_scale = 1.0 if self.unit_scale else self.qk_width**-0.5
        self.widths = [self.num_heads * w for w in (self.qk_width, self.qk_width, self.v_width)]
        self.build_inputs(config, site)
        gate_bias = site.get("gate_bias", site["bias"])
        self.gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=gate_bias) if site["gate"] else None
        self.scale = nn.Parameter(torch.full((self.num_heads,), self.initial_scale))
        self.o_proj = nn.Linear(self.widths[2], config.hidden_size, bias=site.get("out_bias", False))

    def build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        """Build the modules that `project` uses."""
        channels = sum(self.widths)
        self.qkv_proj = nn.Linear(config.hidden_size, channels, bias=site["bias"])
        self.conv1d = nn.Conv1d(channels, channels, self.conv_kernel, groups=channels, bias=site["conv_bias"])

    def initialize(self) -> None:
        """Set initial values where a checkpoint has none. In `add` mode the branch adds nothing until it is trained."""
        init.constant_(self.scale, self.initial_scale)
        self.initialize_inputs()
        if self.mode == "add":
            init.zeros_(self.o_proj.weight)

    def initialize_inputs(self) -> None:
        """Set initial values of the modules of `build_inputs` that transformers cannot initialise."""
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))

    def fill(self, source: Any) -> None:
        """Set the weights of a new hybrid; `source`, of the library that splices, has the base's mixer and teacher."""
        source.fill(self)

    def new_channels(self, weight: Tensor) -> Tensor:
        """Return a view (2,H,...) of the rows of query and key that are no copies; `weight` begins with both."""
        rows = weight[: sum(self.widths[:2])].unflatten(0, (2, self.num_heads, self.qk_width))
        return rows[:, :, self.copied_width :]

    def forward(
        self,
        u_BTD: Tensor,
        cache: Any = None,
        splice_pass: SplicePass | None = None,
        streams: tuple[Tensor, Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B,T,D) -> (B,T,D), and the weights (B,H,T,S) where the attention implementation returns them.

        Args:
            cache: a transformers Cache whose layer `layer_idx` keeps keys and values; updated in place.
            streams: input and output of the mixer's `x_proj`, for a branch with `reads_streams`.
            onto: (B,T,D) to add the output to.
        """
        splice_pass = splice_pass or SplicePass()
        u_BTD = masked(u_BTD, splice_pass.padding)
        query, key, value = self.project(u_BTD, cache, splice_pass, streams)
        if splice_pass.rows is not None:
            whole_key = key.repeat_interleave(self.num_key_value_groups, dim=1)
            splice_pass.rows.collect(self.layer_idx, query, whole_key, splice_pass.padding)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        mixed_BTHV, weights = attend(self, query, key, value, splice_pass.causal)
        return self.put_out(mixed_BTHV, u_BTD, *([] if onto is None else [onto])), weights

    def project(
        self, u_BTD: Tensor, cache: Any, splice_pass: SplicePass, streams: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value, (B,H,T,K), (B,G,T,K) and (B,G,T,V), with the query scaled.

        Args:
            u_BTD: the mixer's input, 0 on padding. The other arguments are as of `forward`.
        """
        # A bias is not 0 on padding, and the convolution would carry it into the text.
        x_BCT, T = masked(self.qkv_proj(u_BTD), splice_pass.padding).transpose(1, 2), u_BTD.shape[1]
        if cache is not None:
            x_BCT = cache.update_conv_state(
                x_BCT, self.layer_idx, state_idx=CONV_STATE, conv_kernel_size=self.conv_kernel
            )
        x_BCT = convolved(self.conv1d, self.conv_kernel, x_BCT, T, splice_pass.documents)
        # Contiguous channels: SDPA's fused kernels refuse a head whose last dimension has a stride.
        x_BTC = self.activate(x_BCT).transpose(1, 2).contiguous()
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in x_BTC.split(self.widths, dim=-1)
        )
        return self.scale_query(query), key, value

    def activate(self, x_BCT: Tensor) -> Tensor:
        """Apply SiLU, where the SSM has it, to values and to copied channels of query and key."""
        if not self.silu:
            return x_BCT
        activated_BCT = F.silu(x_BCT)
        if self.copied_width == self.qk_width:
            return activated_BCT
        if torch.is_grad_enabled():
            is_new_C = torch.zeros(x_BCT.shape[1], dtype=torch.bool, device=x_BCT.device)
            self.new_channels(is_new_C).fill_(True)
            return torch.where(is_new_C[:, None], x_BCT, activated_BCT)
        self.new_channels(activated_BCT.transpose(0, 1)).copy_(self.new_channels(x_BCT.transpose(0, 1)))
        return activated_BCT

    def scale_query(self, query_BHTK: Tensor) -> Tensor:
        """Multiply by the learned scale of each head, and M new channels also by 1/sqrt(M)."""
        query_BHTK = query_BHTK * self.scale[:, None, None]
        if self.copied_width == self.qk_width:
            return query_BHTK
        copied, new = query_BHTK.tensor_split([self.copied_width], dim=-1)
        if torch.is_grad_enabled():
            return torch.cat([copied, new * new.shape[-1] ** -0.5], dim=-1)
        new.mul_(new.shape[-1] ** -0.5)
        return query_BHTK

    def put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor, onto: Tensor | None = None) -> Tensor:
        """Gate, normalise and project the heads' outputs: (B,T,H,V) -> (B,T,D), and add them to `onto` (B,T,D)."""
        if self.gate_proj is not None:
            mixed_BTHV = mixed_BTHV * F.silu(self.gate_proj(u_BTD).view(mixed_BTHV.shape))
        # RMSNorm of every head by itself, in fp32, without a weight: `o_proj` can hold it.
        if is_decoding(u_BTD):
            normed = F.rms_norm(mixed_BTHV, mixed_BTHV.shape[-1:], eps=self.norm_eps)
        else:
            x = mixed_BTHV.float()
            normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)).to(mixed_BTHV.dtype)
        return projected(self.o_proj, normed.flatten(2), onto)


@register_branch("random")
class RandomAttention(SplicedAttention):
    """The control: heads with random weights, without activation and gate."""

    unit_scale = False


ROPE: Check = (
    lambda v: (
        isinstance(v, Mapping)
        and at_least(1)[0](v.get("dim"))
        and v["dim"] % 2 == 0
        and type(v.get("max_position_embeddings")) is int
        and isinstance(v.get("parameters"), Mapping)
    ),
    "dim (an even number), parameters and max_position_embeddings",
)


@register_branch("teacher")
class DonorAttention(SplicedAttention):
    """Attention of a Transformer (Llama, Qwen2, GPT-NeoX): rotary positions and their scaling, biases, grouped keys.

    It has no convolution, no gate and no norm, since the donor has none.

    Args:
        site: as of `SplicedAttention`, and `kv_heads` (of the whole branch), `bias` of query, key and value,
            `out_bias`, and `rope`: `dim`, the channels that turn, the donor's `parameters` and
            `max_position_embeddings`.
    """

    fields: Mapping[str, Check] = {
        "conv_kernel": at_least(0),
        "kv_heads": at_least(1),
        "out_bias": FLAG,
        "rope": ROPE,
    }
    unit_scale = False
    needs_teacher = True
    reads_positions = True

    @classmethod
    def check_site(cls, name: str, site: Mapping[str, Any]) -> None:
        """Check that the key/value heads divide the query heads."""
        if len(site["heads"]) % site["kv_heads"]:
            raise wrong(f"{name}.kv_heads", site["kv_heads"], f"a divisor of the {len(site['heads'])} heads")

    def build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        """Build the three projections and the rotary positions."""
        self.kv_heads, self.rope = site["kv_heads"], site["rope"]
        self.num_key_value_groups = self.num_heads // self.kv_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.qk_width, bias=site["bias"])
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.qk_width, bias=site["bias"])
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.v_width, bias=site["bias"])
        self.build_rotary()

    def build_rotary(self) -> None:
        """Build the rotary positions, whose frequencies are no weights."""
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=self.rope["dim"],
                num_attention_heads=1,
                head_dim=self.rope["dim"],
                rope_parameters=dict(self.rope["parameters"]),
                max_position_embeddings=self.rope["max_position_embeddings"],
            )
        )

    def initialize_inputs(self) -> None:
        """Draw weights with variance 1/fan-in; biases are 0."""
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init.normal_(linear.weight, std=linear.in_features**-0.5)
            if linear.bias is not None:
                init.zeros_(linear.bias)

    def project(
        self, u_BTD: Tensor, cache: Any, splice_pass: SplicePass, streams: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B,H,T,K), (B,G,T,K), (B,G,T,V), with the query scaled."""
        heads_of = ((self.q_proj, self.num_heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        query, key, value = (linear(u_BTD).unflatten(-1, (n, -1)).transpose(1, 2) for linear, n in heads_of)
        positions = splice_pass.positions
        if positions is None:
            positions = torch.arange(u_BTD.shape[1], device=u_BTD.device)[None]
        cos_BTR, sin_BTR = self.rotary(query, positions)
        query, key = (self._rotate(x, cos_BTR[:, None], sin_BTR[:, None]) for x in (query, key))
        return query * self.scale[:, None, None], key, value

    def _rotate(self, x_BHTK: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor) -> Tensor:
        """Rotate the first R channels of every head."""
        rotated, rest = x_BHTK.tensor_split([cos_B1TR.shape[-1]], dim=-1)
        return torch.cat([rotated * cos_B1TR + rotate_half(rotated) * sin_B1TR, rest], dim=-1)

    def put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor, onto: Tensor | None = None) -> Tensor:
        """Project the heads' outputs: (B,T,H,V) -> (B,T,D), and add them to `onto` (B,T,D)."""
        return projected(self.o_proj, mixed_BTHV.flatten(2), onto)


# Mixer ---------------------------------------------------------------------------------------------------------------


class KeepsNothing:
    """A cache that keeps nothing: with it, the family's forward calls its modules in training too.

    Without a cache it would run a fused kernel, which reads the weights of `out_proj` and `x_proj` itself: that would
    bring a silenced head back, and bypass adapters and a branch that reads there.
    """

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Return that there is none."""

    get_recurrent_state = update_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the new inputs of the convolution."""
        return conv_states


class Silence:
    """A hook on `out_proj`: it sets the channels of replaced heads to 0, also where an adapter reads them."""

    def __init__(self, heads: list[int], width: int) -> None:
        self.heads, self.width = heads, width
        self.kept_I: Tensor | None = None  # made once, since indices wait for the device

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Multiply (B,T,I) by 0 or 1."""
        x_BTI, kept_I = inputs[0], self.kept_I
        if kept_I is None or (kept_I.dtype, kept_I.device) != (x_BTI.dtype, x_BTI.device):
            with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
                keep_H = torch.ones(x_BTI.shape[-1] // self.width, dtype=x_BTI.dtype, device=x_BTI.device)
                keep_H[self.heads] = 0
                kept_I = keep_H.repeat_interleave(self.width)
            if type(x_BTI) is Tensor and not torch.compiler.is_compiling():
                self.kept_I = kept_I
        return (x_BTI * kept_I,)


class Streams:
    """A hook on `x_proj`: it records each input and output, (B,T,I) and (B,T,[dt | B | C])."""

    def __init__(self) -> None:
        self.source: nn.Module | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record, but not the layer inside an adapter."""
        if module is self.source:
            self.seen.append((inputs[0], output))

    def taken(self, decoding: bool) -> tuple[Tensor, Tensor]:
        """Return what was seen as one contiguous tensor each, also where tokens ran one by one."""
        seen, self.seen = self.seen, []
        return seen[0] if decoding else tuple(torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))


class HybridMixerMixin:
    """Put before a family's mixer class: `class HybridMixer(HybridMixerMixin, Mamba2Mixer)`.

    Attributes:
        one_by_one: set where the family's scan takes no initial state: several new tokens after a cache then run one
            by one.
        bypassed: modules whose weights the family's forward reads itself, so that an adapter there does nothing.
    """

    one_by_one = False
    bypassed: tuple[str, ...] = ("conv1d", "dt_proj")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kernels_by_device(cls)

    def __init__(self, config: Any, layer_idx: int, **kwargs: Any) -> None:
        super().__init__(config, layer_idx, **kwargs)
        site = splice_sites(config.splice).get(layer_idx)
        self.attention = config.branch_class(site["init"])(config, site, layer_idx) if site else None
        self.silence = Silence(list(site["heads"]), site["head_dim"]) if site and site["mode"] == "replace" else None
        self.streams = Streams() if getattr(self.attention, "reads_streams", False) else None
        methods = [getattr(self.attention, name) for name in ("forward", "put_out")] if site else []
        self.takes_sum = all("onto" in inspect.signature(method).parameters for method in methods)
        self._watch()
        for name, parameter in self.named_parameters(recurse=False):
            if name in IN_FP32:
                parameter.data = parameter.data.float()

    def _watch(self) -> None:
        """Put the hooks on the projections. Adapters and quantisers may have replaced one since the last call."""
        if self.silence is not None and self.silence not in self.out_proj._forward_pre_hooks.values():
            self.out_proj.register_forward_pre_hook(self.silence, prepend=True)
        if self.streams is not None:
            self.streams.source, self.streams.seen = self.x_proj, []
            if self.streams not in self.x_proj._forward_hooks.values():
                self.x_proj.register_forward_hook(self.streams)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Any = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D): `ssm(u) + attention(u)`."""
        if isinstance(attention_mask, SplicePass):  # Mamba-1's model passes no other argument down
            splice_pass, attention_mask = attention_mask, attention_mask.padding
        self._watch()
        output = self._scan(hidden_states, cache, attention_mask, **kwargs)
        if self.attention is None:
            return output
        decoding = is_decoding(hidden_states)
        streams = self.streams.taken(decoding) if self.streams is not None else None
        given = (hidden_states, cache, splice_pass or SplicePass(attention_mask), streams)
        # One operator less for each token, where nothing looks at what the branch returns.
        if self.takes_sum and decoding and is_plain(self.attention):
            return self.attention(*given, onto=output)[0]
        return output + self.attention(*given)[0]

    def _scan(self, hidden_states: Tensor, cache: Any, padding: Tensor | None, **kwargs: Any) -> Tensor:
        """Run the family's own forward."""
        T, family, needs_modules = hidden_states.shape[1], super().forward, self.training and self._needs_modules()
        if cache is None:
            fused = [function for name in FUSED for function in functions_of(type(self), name)] if needs_modules else []
            # On a CPU only what somebody put in the place of a function that was chosen by device is fused.
            if any(hidden_states.is_cuda or not hasattr(function, "has_kernel") for function in fused):
                cache = KeepsNothing()
            return family(hidden_states, attention_mask=padding, cache=cache, **kwargs)
        # State 0 is the scan's; the cache has a second one, which not every branch fills.
        if not (self.one_by_one and T > 1 and cache.has_previous_state(self.layer_idx, state_idx=0)):
            return family(hidden_states, attention_mask=padding, cache=cache, **kwargs)
        parts = hidden_states.split(1, dim=1), [None] * T if padding is None else padding.split(1, dim=1)
        return torch.cat([family(x, attention_mask=m, cache=cache, **kwargs) for x, m in zip(*parts, strict=True)], 1)

    def _needs_modules(self) -> bool:
        """Return whether modules have to be called. Raises ValueError for an adapter that has no effect even then."""
        for name in self.bypassed:
            if hasattr(getattr(self, name, None), "base_layer"):
                hint = f"Pass exclude_modules=[{name!r}] to the adapter's config."
                raise ValueError(f"target_modules: {name} has an adapter, and the scan reads its weight. {hint}")
        parts = [getattr(self, name) for name in ("out_proj", "x_proj") if hasattr(self, name)]
        watched = self.silence is not None or self.streams is not None
        return watched or any(type(part) is not nn.Linear for part in parts)


# Model ---------------------------------------------------------------------------------------------------------------

# Keyword arguments of a forward pass that have no name in its signature: what transformers' trainers pass to the loss,
# what `capture_outputs` reads, and those that end here: `generate` hands on a tokenizer that it is called with.
ENDS_HERE = {*BORDERS, "tokenizer", "assistant_tokenizer"}
PASSED_ON = {
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "ignore_index", "shift_labels",
    "position_ids", *ENDS_HERE,
}  # fmt: skip


class HybridInitMixin:
    """Put before a family's PreTrainedModel classes: initialises the branch where a checkpoint does not have it."""

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = IN_FP32

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SplicedAttention):
            module.initialize()


@dataclass
class HybridOutput(MoeModelOutputWithPast):
    """Output of the model without its head; `splice_attentions` as in `HybridCausalLMOutput`."""

    splice_attentions: tuple[Tensor, ...] | None = None


class HybridModelMixin(HybridInitMixin):
    """Put before a family's model without its head. Builds the masks of a forward once, for all spliced layers.

    Attributes:
        reads_positions: whether the family's forward takes `position_ids`, and masks by kind of layer.
        passes_kwargs: whether the family's forward passes keyword arguments to its mixers.
    """

    reads_positions = True
    passes_kwargs = True
    gradient_checkpointing = False

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @deprecate_kwarg("cache_params", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        splice_queries: Tensor | SpliceRows | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridOutput | tuple:
        """As the family's own forward.

        Documents of a row do not see one another. They are marked by `seq_idx`, by `cu_seq_lens_q`, or by
        `position_ids` that start again; padding is one more document. Where the scan has no kernel that keeps them
        apart, each runs as a row of its own.

        Args:
            attention_mask: (B,S), or (B,T) where no token in the cache is padding.
            output_attentions: return the weights (B,H,T,S) of every attention layer and branch, from below, as
                `attentions`; with eager attention only.
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`. A `SpliceRows` collects them for the caller instead.
            seq_idx: (B,T) index of the document that each token belongs to, where rows hold several documents.

        Raises:
            TypeError: an unknown keyword argument.
            ValueError: a mask of another width; `splice_queries` together with a cache, or with reentrant gradient
                checkpointing; packed documents with a cache, or marked in two ways that contradict.
        """
        if unknown := sorted(kwargs.keys() - PASSED_ON):
            raise TypeError(f"{type(self).__name__}.forward: unexpected keyword argument {unknown[0]!r}. Remove it.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        mask = self._whole_mask(attention_mask, embeds.shape[1], cache)
        documents = marked_documents(kwargs, seq_idx, embeds, mask)
        kwargs = {name: value for name, value in kwargs.items() if name not in ENDS_HERE}
        if output_attentions is not None:
            kwargs["output_attentions"] = output_attentions
        rows = SpliceRows(splice_queries) if isinstance(splice_queries, Tensor) else splice_queries
        if rows is not None or documents is not None:
            self._check_alone(rows, documents, cache is not None or bool(use_cache))
            use_cache = False
        elif self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        let_grow(cache)
        if documents is None:
            output = self._run(embeds, mask, rows, cache=cache, use_cache=use_cache, **kwargs)
        elif self.keeps_apart(embeds.is_cuda):
            positions = positions_of(documents)
            if kwargs.get("position_ids") is None:
                kwargs["position_ids"] = positions
            masks = packed_masks(self.config, embeds, positions)
            output = self._run(embeds, masks, rows, use_cache=False, seq_idx=documents, **kwargs)
        else:
            output = self._run_unpacked(embeds, Unpacked(documents), rows, **kwargs)
        taken = rows.take() if rows is not None and rows is not splice_queries else None
        result = HybridOutput(**output, splice_attentions=taken)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _whole_mask(self, mask: Any, length: int, cache: Any) -> Any:
        """Return a padding mask of width S, one column for each token in the cache and each new one.

        A mask of the new tokens only means that no token in the cache is padding. A mask of more columns, as for a
        cache of fixed size, is cut. Compiled with a cache of fixed size, the width must be S: the number of tokens in
        the cache is then known on the device only.

        Raises:
            ValueError: any other width, or a value that is neither 0 nor 1.
        """
        if not (isinstance(mask, Tensor) and mask.ndim == 2):
            return mask
        if length > 1 and not torch.compiler.is_compiling() and ((mask != 0) & (mask != 1)).any():
            raise ValueError("attention_mask: values other than 0 and 1. Mark the documents of a row by seq_idx.")
        if not {"hybrid", "full_attention"} & set(self.config.layer_types or ()):
            return mask
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, Tensor) and torch.compiler.is_compiling():
            hint = "attention_mask: it needs one column for each token in the cache and each new one"
            torch._assert_async(past + length == mask.shape[1], hint)
            return mask
        past = int(past)
        if mask.shape[1] == length and past:
            return torch.cat([mask.new_ones(mask.shape[0], past), mask], dim=1)
        if mask.shape[1] < past + length:
            hint = f"{past + length}, one for each token in the cache and each new one"
            hint += f", or {length}, if no token in the cache is padding" if past else ""
            raise ValueError(f"attention_mask: {mask.shape[1]} columns. It needs {hint}.")
        return mask[:, : past + length]

    def _check_alone(self, rows: SpliceRows | None, documents: Tensor | None, caches: bool) -> None:
        """Check what attention rows and packed documents need, and tell the rows the documents. Raises ValueError."""
        if caches:
            what = "splice_queries: rows are computed" if documents is None else "seq_idx: documents are packed"
            raise ValueError(f"{what} without a cache only. Set use_cache=False.")
        if rows is None:
            return
        rows.documents = documents
        if self.gradient_checkpointing and self.training:
            blocks = [m for m in self.modules() if getattr(m, "gradient_checkpointing", False) and m is not self]
            if any(m._gradient_checkpointing_func.keywords.get("use_reentrant", True) for m in blocks):
                raise ValueError(
                    "splice_queries: reentrant gradient checkpointing would drop the gradient of the rows. "
                    "Enable it with gradient_checkpointing_kwargs={'use_reentrant': False}."
                )

    def keeps_apart(self, on_cuda: bool) -> bool:
        """Return whether scan and attention keep the documents of a row apart by `seq_idx` and masks, on a device."""
        if self.config._attn_implementation not in ("eager", "sdpa", "flex_attention"):
            return False
        functions = functions_of(type(self), "causal_conv1d_fn", "mamba2_chunk_scan")
        # What replaces a function that was chosen by device takes `seq_idx` on every device.
        return bool(functions) and all(not hasattr(f, "has_kernel") or (on_cuda and f.has_kernel) for f in functions)

    def _run_unpacked(
        self, embeds: Tensor, unpacked: Unpacked, rows: SpliceRows | None, **kwargs: Any
    ) -> dict[str, Any]:
        """Run every document as a row of its own, and return the output of the packed rows."""
        if rows is not None or kwargs.get("output_attentions"):
            name = "splice_queries" if rows is not None else "output_attentions"
            raise ValueError(f"{name}: not with packed documents, without the scan's kernels. Give each a row.")
        positions, outputs = kwargs.pop("position_ids", None), []
        for place_NL, real_NL in unpacked.groups:
            given = {} if positions is None else {"position_ids": unpacked.split(positions, place_NL)}
            parts = unpacked.split(embeds, place_NL)
            outputs.append(self._run(parts, real_NL.long(), None, use_cache=False, **given, **kwargs))
        return unpacked.joined(outputs)

    @property
    def _makes_masks(self) -> bool:
        """Return whether layers need the masks made here."""
        return bool(self.config.splice)

    def _run(
        self, embeds: Tensor, mask: Any, rows: SpliceRows | None, cache: Any = None, **kwargs: Any
    ) -> Mapping[str, Any]:
        """Make the masks and positions, and run the family's forward.

        Args:
            mask: (B,S), None, or masks by kind of layer: of packed documents, or made by `generate`.
        """
        masks = mask
        if not isinstance(mask, dict) and self._makes_masks:
            padding = create_recurrent_attention_mask(self.config, embeds, mask, cache)
            masks = {"full_attention": self._causal_mask(embeds, mask, cache), "linear_attention": padding}
        if isinstance(masks, dict):
            branches = [self.config.branch_class(site["init"]) for site in getattr(self.config, "splice", None) or ()]
            given = kwargs.get("position_ids")
            reads = any(branch.reads_positions for branch in branches)
            positions = self._positions(embeds, mask, cache, given) if reads else None
            padding, causal = masks.get("linear_attention"), masks.get("full_attention")
            carrier = SplicePass(padding, causal, rows, positions, kwargs.get("seq_idx"))
            if self.reads_positions:
                kwargs["position_ids"] = self._positions(embeds, None, cache, given)
            else:
                kwargs.pop("position_ids", None)
            if self.passes_kwargs:
                kwargs["splice_pass"], masks = carrier, masks if self.reads_positions else padding
            else:
                masks = carrier
        return super().forward(inputs_embeds=embeds, attention_mask=masks, cache=cache, return_dict=True, **kwargs)

    def _causal_mask(self, embeds: Tensor, attention_mask: Tensor | None, cache: Any) -> Any:
        """Return the mask of attention layers and branches.

        One new token sees all tokens before it but padding. transformers would wait for the device to look for padding.
        """
        one_of_a_growing_cache = embeds.shape[1] == 1 and (cache is None or isinstance(cache, DynamicCache))
        if not one_of_a_growing_cache or self.config._attn_implementation not in ("eager", "sdpa"):
            return create_causal_mask(self.config, embeds, attention_mask, cache)
        if attention_mask is None or attention_mask.ndim != 2:
            return attention_mask
        hidden_B11S = (attention_mask == 0)[:, None, None]
        least = torch.finfo(embeds.dtype).min
        return torch.zeros(hidden_B11S.shape, dtype=embeds.dtype, device=embeds.device).masked_fill_(hidden_B11S, least)

    def _positions(self, embeds: Tensor, attention_mask: Any, cache: Any, given: Tensor | None) -> Tensor:
        """Return the positions (B or 1,T) that the caller passes, or count them from the first real token."""
        if given is not None:
            return given
        T = embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, int):
            return torch.arange(past, past + T, device=embeds.device)[None]
        return torch.arange(T, device=embeds.device)[None] + past


def recorded(family: Any) -> dict[str, Any]:
    """Return the outputs that a family's models record, with the branches' weights among its own attention's."""
    outputs = family._can_record_outputs
    return {**outputs, "attentions": [outputs["attentions"], SplicedAttention]}


class RecordingMixin:
    """Put between `HybridModelMixin` and a family's model that records no attention weights: records the branches'."""

    _can_record_outputs: dict[str, Any] = {"attentions": SplicedAttention}

    @capture_outputs
    def forward(self, *args: Any, output_attentions: bool | None = None, **kwargs: Any) -> Any:
        """As the family's; the output also has `attentions`, if requested."""
        if output_attentions and self.config._attn_implementation != "eager":
            hint = "Load with attn_implementation='eager'."
            logger.warning_once(f"attentions: only eager attention returns weights. {hint}")
        return super().forward(*args, **{**kwargs, "return_dict": True})


# Causal language model -----------------------------------------------------------------------------------------------


@dataclass
class HybridCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of the language model; `splice_attentions`: (B,H,Q,T) in fp32 of each spliced layer, from below."""

    splice_attentions: tuple[Tensor, ...] | None = None


class HybridCausalLMMixin(HybridInitMixin):
    """Put before a family's causal language model whose forward passes keyword arguments to its model."""

    def _build(self, model: nn.Module) -> None:
        """Set the parts. The family's own `__init__` would build a plain model first."""
        setattr(self, self.base_model_prefix, model)
        self.vocab_size = self.config.vocab_size
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @deprecate_kwarg("cache_params", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward; the last three arguments are as in the model without its head."""
        rows = SpliceRows(splice_queries) if splice_queries is not None else None
        given = {"output_attentions": output_attentions, "splice_queries": rows, "seq_idx": seq_idx}
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **{name: value for name, value in given.items() if value is not None},
            **kwargs,
        )
        result = HybridCausalLMOutput(**output, splice_attentions=rows.take() if rows is not None else None)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()


class LogitsMixin:
    """Put between `HybridCausalLMMixin` and a causal language model whose forward passes no keyword arguments."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Any = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict:
        """As the family's, which drops the padding mask after prefill; attention needs it on every step."""
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "attention_mask": attention_mask} if inputs.get("attention_mask") is None else inputs

    def forward(self, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> dict[str, Any]:
        """Compute the logits (B,T,V) in fp32, and the loss. `labels` are shifted here; -100 is ignored."""
        output = self.base_model(**kwargs)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, positions]
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        parts = {name: output[name] for name in ("cache", "hidden_states", "attentions") if name in output}
        return {"loss": loss, "logits": logits, **parts}
