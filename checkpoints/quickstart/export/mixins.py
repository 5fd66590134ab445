"""What every hybrid shares above its mixers: config, model, causal language model, outputs.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. It must never
know a family: those give the class that a mixin is put before.

Shape legend: B batch, T tokens, V vocabulary, Q rows asked for, H spliced heads of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.utils import ModelOutput, logging
from transformers.utils.output_capturing import capture_outputs

from .attention import HybridInitMixin, SplicedAttention, SplicePass, SpliceRows, is_whole, splice_sites
from .packing import documents_of, packed_masks, positions_of
from .sites import check_entries, check_places

logger = logging.get_logger(__name__)


@dataclass
class HybridOutput(ModelOutput):
    """Output of the model without its head; `splice_attentions` as in `HybridCausalLMOutput`."""

    last_hidden_state: Tensor | None = None
    cache_params: Any = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


@dataclass
class HybridCausalLMOutput(ModelOutput):
    """Output of the language model.

    Attributes:
        logits: (B,T,V).
        cache_params, past_key_values: the cache, under the family's name for it.
        attentions: with `output_attentions`: for each layer that attends, from below, (B,H,T,S).
        splice_attentions: with `splice_queries` given: for each spliced layer from below, (B,H,Q,T) in fp32.
    """

    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: Any = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


class HybridConfigMixin:
    """Put before a family's config class.

    Fields:
        splice: one entry for each spliced layer: `layer`, `heads`, `head_dim` (the width of the SSM's heads), `mode`,
            `init`, `reads`, and what `SplicedAttention` reads. The one source of what is spliced where; `layer_types`
            follows it.

    Raises:
        ValueError: an entry of `splice` lacks a field, or has one that the model cannot be built from.
    """

    @property
    def number_of_conv_states(self) -> int:
        """The SSM's convolution state, and the branch's."""
        return 2

    # Whether attention may take the place of a whole mixer, and whether copies of a head read the mixer's streams.
    takes_layers = False
    reads_streams = False

    def __post_init__(self, **kwargs: Any) -> None:
        check_entries(self.splice, self.reads_streams)
        super().__post_init__(**kwargs)
        self._check_places()

    def ssm_heads(self) -> tuple[int, int]:
        """How many heads an SSM layer has, and their width."""
        return self.num_heads, self.head_dim

    def validate(self) -> None:
        """The checks of `splice`, and the family's own, which know its own layer types alone. Raises ValueError."""
        check_entries(self.splice, self.reads_streams)
        self._check_places()
        with self._unspliced():
            super().validate()

    def _check_places(self) -> None:
        if self.splice:
            with self._unspliced():
                kinds = getattr(self, "layers_block_type", None) or self.layer_types
            layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
            check_places(self.splice, layers, *self.ssm_heads(), self.takes_layers, self.reads_streams)

    @contextmanager
    def _unspliced(self) -> Iterator[None]:
        splice, self.splice = self.splice, None
        try:
            yield
        finally:
            self.splice = splice

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers'. Where the modelling files travel, `auto_map` names all classes, whichever is saved."""
        if self._auto_class is not None:
            file, stem = type(self).__module__.rsplit(".", 1)[-1], type(self).__name__.removesuffix("Config")
            names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
            self.auto_map = {auto: f"{file}.{stem}{suffix}" for auto, suffix in names.items()}
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def cache_types(self, plain: list[str]) -> list[str]:
        """What the cache keeps for each layer: keys and values for the spliced ones too, or alone in a whole layer."""
        spliced = {i: "full_attention" if is_whole(site) else "hybrid" for i, site in splice_sites(self.splice).items()}
        return [spliced.get(i, kind) for i, kind in enumerate(plain)]


class HybridModelMixin(HybridInitMixin):
    """Put before a family's model without its head. Builds masks once a forward and hands them to the spliced layers.

    Attributes:
        cache_argument: the family's name of the cache.
        hands_down: whether the family's forward hands keyword arguments to its mixers.
        packs: whether the family's scan takes `seq_idx`.
    """

    cache_argument = "past_key_values"
    hands_down = True
    packs = True
    gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        splice_queries: Tensor | SpliceRows | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridOutput | tuple:
        """As the family's own forward.

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows come back as `splice_attentions`.
                A `SpliceRows` collects them for the caller instead.
            seq_idx: (B,T) the document of its row that each token belongs to, where rows hold several: none of them
                sees another. Padding is one more document. The scan's kernels do this; without them it is refused.
            attention_mask: (B, tokens in the cache and new ones), or (B,T) where no token in the cache is padding.
            output_attentions: `attentions` holds the weights (B,H,T,S) of every layer that attends, from below, be it
                the family's own attention or a branch; eager attention alone gives them.

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
        cache = kwargs.pop(self.cache_argument, None)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        attention_mask = self._whole_mask(attention_mask, inputs_embeds.shape[1], cache)
        mine = isinstance(splice_queries, Tensor)
        rows = SpliceRows(splice_queries) if mine else splice_queries
        if rows is not None:
            self._check_rows(cache)
        if seq_idx is not None:
            attention_mask, kwargs = self._packed_arguments(seq_idx, inputs_embeds, attention_mask, cache, kwargs)
        if self.config.splice or seq_idx is not None:
            attention_mask, kwargs = self._splice_arguments(inputs_embeds, attention_mask, cache, rows, kwargs)
        kwargs[self.cache_argument] = cache
        if output_attentions is not None:
            kwargs["output_attentions"] = output_attentions
        output = super().forward(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, use_cache=use_cache, return_dict=True, **kwargs
        )
        result = HybridOutput(**output, splice_attentions=rows.take() if rows is not None and mine else None)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _whole_mask(self, mask: Any, length: int, cache: Any) -> Any:
        """A padding mask with one column for each token in the cache and each new one, as attention reads it.

        A mask of the new tokens alone is taken to say that no token in the cache is padding; what goes beyond the new
        tokens, as for a cache of fixed size, is cut off. Raises ValueError where a mask has any other width.
        """
        attends = {"hybrid", "full_attention"} & set(self.config.layer_types or ())
        if not (isinstance(mask, Tensor) and mask.ndim == 2 and attends) or torch.compiler.is_compiling():
            return mask
        past = int(cache.get_seq_length()) if cache is not None else 0
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
        """The mask and the keyword arguments for the family's forward."""
        if isinstance(attention_mask, dict):  # of packed documents, or by `generate` for a cache that compiles
            causal, padding = attention_mask.get("full_attention"), attention_mask.get("linear_attention")
        else:
            causal = create_causal_mask(self.config, embeds, attention_mask, cache)
            padding = create_recurrent_attention_mask(self.config, embeds, attention_mask, cache)
        positions = self._positions(embeds, attention_mask, cache, kwargs)
        carrier = SplicePass(padding, causal, rows, positions, kwargs.get("seq_idx"))
        if not self.hands_down:
            return carrier, kwargs
        if self.cache_argument == "past_key_values" and kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": self._positions(embeds, None, cache, kwargs)}
        own_mask = padding if self.cache_argument == "cache_params" else attention_mask
        return own_mask, {**kwargs, "splice_pass": carrier}

    def _packed_arguments(
        self, seq_idx: Tensor, embeds: Tensor, attention_mask: Any, cache: Any, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Masks and keyword arguments that keep a row's documents apart; raises ValueError where nothing would."""
        implementation = self.config._attn_implementation
        if not self.packs:
            raise ValueError(f"seq_idx: the scan of {self.config.model_type} takes none; give every document a row.")
        if cache is not None:
            raise ValueError("seq_idx: documents are packed without a cache only; pass use_cache=False.")
        if attention_mask is not None:
            raise ValueError("seq_idx: padding is a document of its own; leave attention_mask out.")
        if implementation not in ("eager", "sdpa", "flex_attention"):
            raise ValueError(f"seq_idx: {implementation} takes no mask; choose eager, sdpa or flex_attention.")
        if seq_idx.shape != embeds.shape[:2]:
            raise ValueError(f"seq_idx: {tuple(seq_idx.shape)}; it needs one index a token, {tuple(embeds.shape[:2])}.")
        documents = documents_of(seq_idx)
        positions, given = positions_of(documents), kwargs.get("position_ids")
        if given is not None and not torch.equal(given.expand_as(positions), positions):
            raise ValueError("position_ids: with seq_idx they begin at 0 in every document; leave them out.")
        if self.cache_argument == "past_key_values":
            kwargs = {**kwargs, "position_ids": positions}
        return packed_masks(self.config, embeds, positions), {**kwargs, "seq_idx": documents}

    def _positions(self, embeds: Tensor, attention_mask: Any, cache: Any, kwargs: dict[str, Any]) -> Tensor:
        """(B or 1,T), as the caller says or else counted from the first real token."""
        if kwargs.get("seq_idx") is not None:
            return positions_of(kwargs["seq_idx"])
        if kwargs.get("position_ids") is not None:
            return kwargs["position_ids"]
        T = embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        past = cache.get_seq_length() if cache is not None else 0
        return torch.arange(T, device=embeds.device)[None] + past

    def _check_rows(self, cache: Any) -> None:
        if cache is not None:
            raise ValueError("splice_queries: rows are computed without a cache only; pass use_cache=False.")
        if not (self.gradient_checkpointing and self.training):
            return
        blocks = [m for m in self.modules() if getattr(m, "gradient_checkpointing", False) and m is not self]
        if any(m._gradient_checkpointing_func.keywords.get("use_reentrant", True) for m in blocks):
            raise ValueError(
                "splice_queries: reentrant gradient checkpointing would drop the gradient of the rows; "
                "enable it with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


def recorded(family: Any) -> dict[str, Any]:
    """What a family's models record on request, with the weights of the branches among those of its own attention."""
    own = family._can_record_outputs
    return {**own, "attentions": [own["attentions"], SplicedAttention]}


class RecordingMixin:
    """Put between `HybridModelMixin` and a family's model that records no attention weights: those of the branches."""

    _can_record_outputs: dict[str, Any] = {"attentions": SplicedAttention}

    @capture_outputs
    def forward(self, *args: Any, output_attentions: bool | None = None, **kwargs: Any) -> Any:
        """As the family's; the output also holds `attentions`, if requested."""
        if output_attentions and self.config._attn_implementation != "eager":
            logger.warning_once(
                "attentions: only eager attention gives weights. Load with attn_implementation='eager'."
            )
        return super().forward(*args, **{**kwargs, "return_dict": True})


class HybridCausalLMMixin(HybridInitMixin):
    """Put before a family's causal language model whose forward hands keyword arguments to its model."""

    def _build(self, model: nn.Module) -> None:
        """The parts, where the family's own `__init__` would build a plain model first."""
        self.model, self.vocab_size = model, self.config.vocab_size
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward.

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows come back as `splice_attentions`.
            seq_idx: (B,T) the document of its row that each token belongs to, as of the model without its head.
        """
        rows = None
        if splice_queries is not None:
            rows = kwargs["splice_queries"] = SpliceRows(splice_queries)
        if seq_idx is not None:
            kwargs["seq_idx"] = seq_idx
        if output_attentions is not None:
            kwargs["output_attentions"] = output_attentions
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **kwargs,
        )
        result = HybridCausalLMOutput(**output, splice_attentions=rows.take() if rows is not None else None)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()


class MambaHybridCausalLMMixin(HybridInitMixin):
    """Put before the causal language models that call their cache `cache_params`: Mamba-1 and Mamba-2.

    They drop keyword arguments on the way to their model, so the way from there to the logits is written here.
    "Mamba" in the class's name makes `generate` pass the cache under that name.
    """

    def _build(self, backbone: nn.Module) -> None:
        """The parts, where the family's own `__init__` would build a plain backbone first."""
        self.backbone = backbone
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As the family's, which drops the padding mask after prefill; attention needs it on every step."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs["attention_mask"] = attention_mask
        return inputs

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        """As `generate` does it for `past_key_values`: of a whole text, what the caller's cache holds is left out."""
        cache, mask = model_kwargs.get("cache_params"), model_kwargs.get("attention_mask")
        counts_tokens = bool({"hybrid", "full_attention"} & set(self.config.layer_types))
        if cache is not None and counts_tokens and model_kwargs.get("inputs_embeds") is None:
            whole = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
            if whole == input_ids.shape[1]:
                input_ids = input_ids[:, cache.get_seq_length() :]
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Any = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward; logits are fp32.

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows come back as `splice_attentions`.
            seq_idx: (B,T) the document of its row that each token belongs to, as of the model without its head.
        """
        output = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            cache_params=cache_params,
            use_cache=use_cache,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            splice_queries=splice_queries,
            seq_idx=seq_idx,
            output_attentions=output_attentions,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, kept]
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = HybridCausalLMOutput(
            loss=loss,
            logits=logits,
            cache_params=output.cache_params,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            splice_attentions=output.splice_attentions,
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()
