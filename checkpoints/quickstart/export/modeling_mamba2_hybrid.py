"""Mamba-2 with spliced attention heads: config, model and causal language model.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Everything
but the branch is transformers' own Mamba-2 (arXiv 2405.21060).

Shape legend: B batch, T tokens, V vocabulary, Q rows asked for, H spliced heads of a layer.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, Mamba2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.mamba2.modeling_mamba2 import (
    Mamba2ForCausalLM,
    Mamba2Mixer,
    Mamba2Model,
    Mamba2PreTrainedModel,
)
from transformers.utils import ModelOutput

from .attention import HybridInitMixin, HybridMixerMixin, SpliceRows, splice_sites


class Mamba2HybridConfig(Mamba2Config):
    """Mamba2Config and one field more.

    Args:
        splice: one entry for each spliced layer: `layer`, `heads`, `mode`, `init`, `reads`, `qk_width`, `v_width`,
            `conv_kernel`, `activation`, `gate`. The one source of what is spliced where; `layer_types` follows it.
    """

    model_type = "mamba2_hybrid"

    splice: list | None = None

    @property
    def layer_types(self) -> list[str]:
        """What the cache keeps for each layer: keys and values for the spliced ones alone."""
        spliced = splice_sites(self.splice)
        return ["hybrid" if i in spliced else "linear_attention" for i in range(self.num_hidden_layers)]

    @property
    def number_of_conv_states(self) -> int:
        """The SSM's convolution state, and the branch's."""
        return 2


class Mamba2HybridMixer(HybridMixerMixin, Mamba2Mixer):
    """`Mamba2Mixer` with a branch where the config splices one."""

    def __init__(self, config: Mamba2HybridConfig, layer_idx: int, initialize_mixer_weights: bool = False) -> None:
        super().__init__(config, layer_idx, initialize_mixer_weights)
        self.splice_attention(config, layer_idx)


@dataclass
class Mamba2HybridOutput(ModelOutput):
    """Output of the model without its head; `splice_attentions` as in `Mamba2HybridCausalLMOutput`."""

    last_hidden_state: Tensor | None = None
    cache_params: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


@dataclass
class Mamba2HybridCausalLMOutput(ModelOutput):
    """Output of the language model.

    Attributes:
        logits: (B,T,V), fp32.
        splice_attentions: with `splice_queries` given: for each spliced layer from below, (B,H,Q,T) in fp32.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    splice_attentions: tuple[Tensor, ...] | None = None


class Mamba2HybridPreTrainedModel(HybridInitMixin, Mamba2PreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = Mamba2HybridConfig


class Mamba2HybridModel(Mamba2HybridPreTrainedModel, Mamba2Model):
    """`Mamba2Model` whose mixers may have a branch."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            block.mixer = Mamba2HybridMixer(config, index)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Any = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        splice_queries: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Mamba2Model.forward`, with the causal mask built once for all spliced layers.

        Raises:
            ValueError: `splice_queries` together with a cache, or with reentrant gradient checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings(input_ids)
        use_cache = use_cache if use_cache is not None else (self.config.use_cache and not self.training)
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and cache_params is None:
            cache_params = DynamicCache(config=self.config)
        rows = self._open_rows(splice_queries, cache_params)
        mask = None
        if self.config.splice:
            mask = create_causal_mask(self.config, inputs_embeds, attention_mask, cache_params)
        output = super().forward(
            inputs_embeds=inputs_embeds,
            cache_params=cache_params,
            use_cache=use_cache,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            splice_mask=mask,
            splice_rows=rows,
            **kwargs,
        )
        attentions = rows.take() if rows is not None else None
        result = Mamba2HybridOutput(
            output.last_hidden_state, output.cache_params, output.hidden_states, splice_attentions=attentions
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _open_rows(self, splice_queries: Tensor | None, cache_params: Any) -> SpliceRows | None:
        if splice_queries is None:
            return None
        if cache_params is not None:
            raise ValueError("splice_queries: rows are computed without a cache only; pass use_cache=False.")
        checkpointing = self.gradient_checkpointing and self.training
        if checkpointing and self.layers[0]._gradient_checkpointing_func.keywords.get("use_reentrant", True):
            raise ValueError(
                "splice_queries: reentrant gradient checkpointing would drop the gradient of the rows; "
                "enable it with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        return SpliceRows(splice_queries)


class Mamba2HybridForCausalLM(Mamba2HybridPreTrainedModel, Mamba2ForCausalLM):
    """Mamba-2 language model with spliced attention heads.

    "Mamba" in the name makes `generate` pass the cache as `cache_params`.
    """

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super(Mamba2ForCausalLM, self).__init__(config)  # its own __init__ would build a plain backbone first
        self.backbone = Mamba2HybridModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As Mamba-2's, which drops the padding mask after prefill; attention needs it on every step."""
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **kwargs)
        inputs["attention_mask"] = attention_mask
        return inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Any = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        splice_queries: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Mamba2ForCausalLM.forward`.

        Args:
            splice_queries: (B,Q) token indices, -1 for none; their attention rows come back as `splice_attentions`.
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
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, kept]
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = Mamba2HybridCausalLMOutput(
            loss, logits, output.cache_params, output.hidden_states, output.splice_attentions
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()


__all__ = ["Mamba2HybridConfig", "Mamba2HybridForCausalLM", "Mamba2HybridModel", "Mamba2HybridPreTrainedModel"]
