"""The mixin of a hybrid's model without its head: masks, positions and packed documents for the spliced layers.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H heads of a layer, Q requested rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.utils import ModelOutput, logging
from transformers.utils.output_capturing import capture_outputs

from .attention import SplicedAttention
from .cache_name import RENAMED, cache_name, take_cache
from .growing_cache import let_grow
from .mixer import IN_FP32
from .packing import documents_of, packed_masks, positions_of
from .splice_pass import SplicePass, SpliceRows

logger = logging.get_logger(__name__)


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
class HybridOutput(ModelOutput):
    """Output of the model without its head; `splice_attentions` as in `HybridCausalLMOutput`."""

    last_hidden_state: Tensor | None = None
    if RENAMED:
        cache: Any = None
    else:
        cache_params: Any = None
        past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


class HybridModelMixin(HybridInitMixin):
    """Put before a family's model without its head. Builds the masks of a forward once, for all spliced layers.

    Attributes:
        cache_argument: the family's name of the cache before transformers 5.24.
        passes_kwargs: whether the family's forward passes keyword arguments to its mixers.
        packs: whether the family's scan takes `seq_idx`.
    """

    cache_argument = "past_key_values"
    passes_kwargs = True
    packs = True
    gradient_checkpointing = False

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

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`. A `SpliceRows` collects them for the caller instead.
            seq_idx: (B,T) index of the document that each token belongs to, where rows hold several documents.
                Documents do not see one another. Padding is one more document. It needs the scan's kernels, or
                this library's training, which has a scan in PyTorch for it.
            attention_mask: (B,S), or (B,T) where no token in the cache is padding.
            output_attentions: return the weights (B,H,T,S) of every attention layer and branch, from below, as
                `attentions`; with eager attention only.

        Raises:
            ValueError: a mask of another width; `splice_queries` together with a cache, or with reentrant gradient
                checkpointing; `seq_idx` where documents would see one another.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        use_cache = use_cache if use_cache is not None else (self.config.use_cache and not self.training)
        if self.gradient_checkpointing and self.training:
            use_cache = False
        cache = take_cache(cache, kwargs)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        let_grow(cache)
        attention_mask = self._whole_mask(attention_mask, inputs_embeds.shape[1], cache)
        rows = SpliceRows(splice_queries) if isinstance(splice_queries, Tensor) else splice_queries
        if rows is not None:
            self._check_rows(cache)
        if seq_idx is not None:
            attention_mask, kwargs = self._packed_arguments(seq_idx, inputs_embeds, attention_mask, cache, kwargs)
        if self.config.splice or seq_idx is not None:
            attention_mask, kwargs = self._splice_arguments(inputs_embeds, attention_mask, cache, rows, kwargs)
        kwargs[cache_name(self.cache_argument)] = cache
        if output_attentions is not None:
            kwargs["output_attentions"] = output_attentions
        output = super().forward(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, use_cache=use_cache, return_dict=True, **kwargs
        )
        taken = rows.take() if rows is not None and rows is not splice_queries else None
        result = HybridOutput(**output, splice_attentions=taken)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _whole_mask(self, mask: Any, length: int, cache: Any) -> Any:
        """Return a padding mask of width S, one column for each token in the cache and each new one.

        A mask of the new tokens only means that no token in the cache is padding. A mask of more columns, as for a
        cache of fixed size, is cut. Raises ValueError for any other width. Compiled with a cache of fixed size, the
        width must be S: the number of tokens in the cache is then known on the device only.
        """
        attends = {"hybrid", "full_attention"} & set(self.config.layer_types or ())
        if not (isinstance(mask, Tensor) and mask.ndim == 2 and attends):
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

    def _splice_arguments(
        self, embeds: Tensor, attention_mask: Any, cache: Any, rows: SpliceRows | None, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mask and the keyword arguments for the family's forward."""
        if isinstance(attention_mask, dict):  # of packed documents, or by `generate` for a cache that compiles
            causal, padding = attention_mask.get("full_attention"), attention_mask.get("linear_attention")
        else:
            causal = self._causal_mask(embeds, attention_mask, cache)
            padding = create_recurrent_attention_mask(self.config, embeds, attention_mask, cache)
        branches = [self.config.branch_class(site["init"]) for site in self.config.splice or ()]
        rotates = any(branch.reads_positions for branch in branches)
        positions = self._positions(embeds, attention_mask, cache, kwargs) if rotates else None
        carrier = SplicePass(padding, causal, rows, positions, kwargs.get("seq_idx"))
        if not self.passes_kwargs:
            return carrier, {name: value for name, value in kwargs.items() if name != "position_ids"}
        if self.cache_argument == "past_key_values" and kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": self._positions(embeds, None, cache, kwargs)}
        family_mask = padding if self.cache_argument == "cache_params" else attention_mask
        return family_mask, {**kwargs, "splice_pass": carrier}

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

    def _packed_arguments(
        self, seq_idx: Tensor, embeds: Tensor, attention_mask: Any, cache: Any, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return masks and keyword arguments that keep a row's documents apart. Raises ValueError if not possible."""
        implementation = self.config._attn_implementation
        if not self.packs:
            raise ValueError(f"seq_idx: the scan of {self.config.model_type} takes none. Give every document a row.")
        if cache is not None:
            raise ValueError("seq_idx: documents are packed without a cache only. Set use_cache=False.")
        if attention_mask is not None:
            raise ValueError("seq_idx: padding is a document of its own. Do not pass attention_mask.")
        if implementation not in ("eager", "sdpa", "flex_attention"):
            raise ValueError(f"seq_idx: {implementation} takes no mask. Use eager, sdpa or flex_attention.")
        if seq_idx.shape != embeds.shape[:2]:
            raise ValueError(f"seq_idx: {tuple(seq_idx.shape)}. It needs one index a token, {tuple(embeds.shape[:2])}.")
        documents = documents_of(seq_idx)
        positions, position_ids = positions_of(documents), kwargs.get("position_ids")
        if position_ids is not None and not torch.equal(position_ids.expand_as(positions), positions):
            raise ValueError("position_ids: with seq_idx they start at 0 in every document. Do not pass them.")
        if self.cache_argument == "past_key_values":
            kwargs = {**kwargs, "position_ids": positions}
        return packed_masks(self.config, embeds, positions), {**kwargs, "seq_idx": documents}

    def _positions(self, embeds: Tensor, attention_mask: Any, cache: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return the positions (B or 1,T) that the caller passes, or count them from the first real token."""
        if kwargs.get("seq_idx") is not None:
            return positions_of(kwargs["seq_idx"])
        if kwargs.get("position_ids") is not None:
            return kwargs["position_ids"]
        T = embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, int):
            return torch.arange(past, past + T, device=embeds.device)[None]
        return torch.arange(T, device=embeds.device)[None] + past

    def _check_rows(self, cache: Any) -> None:
        if cache is not None:
            raise ValueError("splice_queries: rows are computed without a cache only. Set use_cache=False.")
        if not (self.gradient_checkpointing and self.training):
            return
        blocks = [m for m in self.modules() if getattr(m, "gradient_checkpointing", False) and m is not self]
        if any(m._gradient_checkpointing_func.keywords.get("use_reentrant", True) for m in blocks):
            raise ValueError(
                "splice_queries: reentrant gradient checkpointing would drop the gradient of the rows. "
                "Enable it with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


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
            logger.warning_once(
                "attentions: only eager attention returns weights. Load with attn_implementation='eager'."
            )
        return super().forward(*args, **{**kwargs, "return_dict": True})
