"""The mixins of a hybrid's model and causal language model: masks, positions and packed documents.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H heads of a layer, V vocabulary, Q requested
rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.utils import ModelOutput, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs

from .attention import SplicedAttention
from .growing_cache import let_grow
from .kernels import keeps_documents_apart
from .mixer import IN_FP32
from .packing import BORDERS, SplicePass, SpliceRows, Unpacked, marked_documents, packed_masks, positions_of

logger = logging.get_logger(__name__)

# Keyword arguments of a forward pass that have no name in its signature: what transformers' trainers pass to the loss,
# and what `capture_outputs` reads. Those that end here: the index that older releases pass beside a cache, and what
# `generate` hands on if it is called with a tokenizer.
ENDS_HERE = {*BORDERS, "cache_position", "tokenizer", "assistant_tokenizer"}
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
class HybridOutput(ModelOutput):
    """Output of the model without its head; `splice_attentions` as in `HybridCausalLMOutput`."""

    last_hidden_state: Tensor | None = None
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


@dataclass
class HybridCausalLMOutput(ModelOutput):
    """Output of the language model.

    Attributes:
        logits: (B,T,V).
        attentions: with `output_attentions`: (B,H,T,S) of each layer with attention, from below.
        splice_attentions: with `splice_queries`: (B,H,Q,T) in fp32 of each spliced layer, from below.
    """

    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
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
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`. A `SpliceRows` collects them for the caller instead.
            seq_idx: (B,T) index of the document that each token belongs to, where rows hold several documents.
            attention_mask: (B,S), or (B,T) where no token in the cache is padding.
            output_attentions: return the weights (B,H,T,S) of every attention layer and branch, from below, as
                `attentions`; with eager attention only.

        Raises:
            TypeError: an unknown keyword argument.
            ValueError: a mask of another width; `splice_queries` together with a cache, or with reentrant gradient
                checkpointing; packed documents with a cache, or marked in two ways that contradict.
        """
        if unknown := sorted(kwargs.keys() - PASSED_ON):
            raise TypeError(f"{type(self).__name__}.forward: unexpected keyword argument {unknown[0]!r}. Remove it.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        attention_mask = self._whole_mask(attention_mask, inputs_embeds.shape[1], cache)
        documents = marked_documents(kwargs, seq_idx, inputs_embeds, attention_mask)
        kwargs = {name: value for name, value in kwargs.items() if name not in ENDS_HERE}
        rows = SpliceRows(splice_queries) if isinstance(splice_queries, Tensor) else splice_queries
        if rows is not None or documents is not None:
            self._check_alone(rows, documents, cache is not None or bool(use_cache))
            use_cache = False
        elif self.gradient_checkpointing and self.training:
            use_cache = False
        use_cache = use_cache if use_cache is not None else (self.config.use_cache and not self.training)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        let_grow(cache)
        unpacked = None
        if documents is not None and self.keeps_apart(inputs_embeds.is_cuda):
            attention_mask, kwargs = self._packed_arguments(documents, inputs_embeds, attention_mask, kwargs)
        elif documents is not None:
            unpacked = Unpacked(documents)
            inputs_embeds, attention_mask = unpacked.split(inputs_embeds), unpacked.mask_NL.long()
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = unpacked.split(kwargs["position_ids"])
            if rows is not None or output_attentions:
                name = "output_attentions" if output_attentions else "splice_queries"
                raise ValueError(f"{name}: not with packed documents, without the scan's kernels. Give each a row.")
        attention_mask, kwargs = self._splice_arguments(inputs_embeds, attention_mask, cache, rows, kwargs)
        if output_attentions is not None:
            kwargs["output_attentions"] = output_attentions
        output = super().forward(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        if unpacked is not None:
            output = unpacked.joined(output)
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

    @property
    def _makes_masks(self) -> bool:
        """Return whether layers need the masks made here."""
        return bool(self.config.splice)

    def keeps_apart(self, on_cuda: bool) -> bool:
        """Return whether scan and attention keep the documents of a row apart by `seq_idx` and masks."""
        takes_mask = self.config._attn_implementation in ("eager", "sdpa", "flex_attention")
        return takes_mask and keeps_documents_apart(type(self), on_cuda)

    def _packed_arguments(
        self, documents: Tensor, embeds: Tensor, attention_mask: Any, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return masks and keyword arguments that keep a row's documents apart."""
        positions = positions_of(documents)
        given = kwargs.get("position_ids")
        kwargs = {**kwargs, "seq_idx": documents, "position_ids": positions if given is None else given}
        return packed_masks(self.config, embeds, positions), kwargs

    def _splice_arguments(
        self, embeds: Tensor, attention_mask: Any, cache: Any, rows: SpliceRows | None, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mask and the keyword arguments for the family's forward."""
        if isinstance(attention_mask, dict):  # of packed documents, or by `generate` for a cache that compiles
            masks = attention_mask
        elif not self._makes_masks:
            return attention_mask, kwargs
        else:
            padding = create_recurrent_attention_mask(self.config, embeds, attention_mask, cache)
            causal = self._causal_mask(embeds, attention_mask, cache)
            masks = {"full_attention": causal, "linear_attention": padding}
        branches = [self.config.branch_class(site["init"]) for site in getattr(self.config, "splice", None) or ()]
        rotates = any(branch.reads_positions for branch in branches)
        positions = self._positions(embeds, attention_mask, cache, kwargs) if rotates else None
        padding, causal = masks.get("linear_attention"), masks.get("full_attention")
        carrier = SplicePass(padding, causal, rows, positions, kwargs.get("seq_idx"))
        if not self.reads_positions:
            kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
        elif kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": self._positions(embeds, None, cache, kwargs)}
        if not self.passes_kwargs:
            return carrier, kwargs
        return masks if self.reads_positions else padding, {**kwargs, "splice_pass": carrier}

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

    def _positions(self, embeds: Tensor, attention_mask: Any, cache: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return the positions (B or 1,T) that the caller passes, or count them from the first real token."""
        if kwargs.get("position_ids") is not None:
            return kwargs["position_ids"]
        T = embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, int):
            return torch.arange(past, past + T, device=embeds.device)[None]
        return torch.arange(T, device=embeds.device)[None] + past

    def _check_alone(self, rows: SpliceRows | None, documents: Tensor | None, caches: bool) -> None:
        """Check what attention rows and packed documents need, and tell the rows the documents. Raises ValueError."""
        if caches:
            what = "splice_queries: rows are computed" if documents is None else "seq_idx: documents are packed"
            raise ValueError(f"{what} without a cache only. Set use_cache=False.")
        if rows is None:
            return
        rows.documents = documents
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
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward.

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`.
            seq_idx: (B,T) index of the document that each token belongs to, as in the model without its head.
        """
        rows = SpliceRows(splice_queries) if splice_queries is not None else None
        given = {"splice_queries": rows, "seq_idx": seq_idx}
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
