"""The mixins of a hybrid's causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H heads of a layer, V vocabulary, Q requested
rows.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from .cache_name import RENAMED, cache_name, take_cache
from .model import HybridInitMixin
from .splice_pass import SpliceRows


@dataclass
class HybridCausalLMOutput(ModelOutput):
    """Output of the language model.

    Attributes:
        logits: (B,T,V).
        cache: the cache. Before transformers 5.24, the family's name for it is `cache_params` or `past_key_values`.
        attentions: with `output_attentions`: (B,H,T,S) of each layer with attention, from below.
        splice_attentions: with `splice_queries`: (B,H,Q,T) in fp32 of each spliced layer, from below.
    """

    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None
    if RENAMED:
        cache: Any = None
    else:
        cache_params: Any = None
        past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


class HybridCausalLMMixin(HybridInitMixin):
    """Put before a family's causal language model whose forward passes keyword arguments to its model."""

    def _build(self, model: nn.Module) -> None:
        """Set the parts. The family's own `__init__` would build a plain model first."""
        self.model, self.vocab_size = model, self.config.vocab_size
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward.

        Args:
            past_key_values: the cache. Before transformers 5.24, `generate` looks for this name here.
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`.
            seq_idx: (B,T) index of the document that each token belongs to, as in the model without its head.
        """
        rows = None
        kwargs[cache_name("past_key_values")] = take_cache(cache, kwargs, past_key_values=past_key_values)
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
    """Put before the causal language models whose forward passes no keyword arguments: Mamba-1 and Mamba-2.

    This class computes the logits itself. Before transformers 5.24, `generate` passes the cache as `cache_params` to
    classes with "Mamba" in their name, and as `past_key_values` to others.
    """

    def _build(self, backbone: nn.Module) -> None:
        """Set the parts. The family's own `__init__` would build a plain backbone first."""
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
        """Skip the tokens of a whole text that the caller's cache holds. From 5.24 on, `generate` does it itself."""
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
        cache: Any = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        splice_queries: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput | tuple:
        """As the family's own forward; logits are fp32.

        Args:
            cache_params: the cache. Before transformers 5.24, `generate` looks for this name here.
            position_ids: (B,T) or (1,T), for branches with rotary positions. It has no name in the signature, or
                `generate` would pass it; counted from the first token that is not padding if None.
            splice_queries: (B,Q) token indices, -1 for none; their attention rows are returned as
                `splice_attentions`.
            seq_idx: (B,T) index of the document that each token belongs to, as in the model without its head.
        """
        position_ids = kwargs.pop("position_ids", None)
        output = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            cache=take_cache(cache, kwargs, cache_params=cache_params),
            use_cache=use_cache,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            splice_queries=splice_queries,
            seq_idx=seq_idx,
            output_attentions=output_attentions,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, positions]
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        name = cache_name("cache_params")
        result = HybridCausalLMOutput(
            loss=loss,
            logits=logits,
            **{name: getattr(output, name)},
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            splice_attentions=output.splice_attentions,
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()
