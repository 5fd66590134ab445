"""Mamba-2 with spliced attention heads, from vLLM's own parts: `MambaMixer2`, `Attention` and its convolution kernels.

A spliced layer holds a Mamba state and paged keys and values. The branch's convolution keeps its past in a third state
of the mixer. All layers have that state, so that all have the same pages.

Shape legend: N tokens of all requests, D model width, C channels.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    get_conv_copy_spec,
    is_conv_state_dim_first,
)
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from .branch import AttentionBranch
from .config import Mamba2HybridConfig
from .names import RENAMED

BRANCH_STATE = 2  # after the mixer's convolution state and its SSM state


def state_shapes(config: Mamba2HybridConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's three states: the mixer's convolution, the SSM, the branch's convolution."""
    conv, ssm = MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=1,
        intermediate_size=config.expand * config.hidden_size,
        n_groups=config.n_groups,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        state_size=config.state_size,
        conv_kernel=config.conv_kernel,
    )
    channels, past = config.conv_state_shape
    return conv, ssm, (channels, past) if is_conv_state_dim_first() else (past, channels)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the three states."""
    cache = vllm_config.cache_config
    conv, ssm = MambaStateDtypeCalculator.mamba2_state_dtype(
        vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return conv, ssm, conv


class HybridMixer(MambaMixer2):
    """`MambaMixer2` that also keeps the state of a branch's convolution."""

    def __init__(self, config: Mamba2HybridConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(
            hidden_size=config.hidden_size,
            ssm_state_size=config.state_size,
            conv_kernel_size=config.conv_kernel,
            intermediate_size=config.expand * config.hidden_size,
            use_conv_bias=config.use_conv_bias,
            use_bias=config.use_bias,
            n_groups=config.n_groups,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.layer_norm_epsilon,
            activation=config.hidden_act,
            model_config=vllm_config.model_config,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
        )
        self.shapes, self.dtypes = state_shapes(config), state_dtypes(vllm_config)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the three states."""
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the three states."""
        return self.dtypes

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """As the mixer's, without states from within a prefill: vLLM stores the first two only."""
        return replace(super().get_kv_cache_spec(vllm_config), num_prefill_checkpoint_blocks=0)

    def convolve(self, x_NC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a branch's causal convolution to the new tokens of every request, and update its state."""
        metadata = get_forward_context().attn_metadata
        metadata = metadata.get(self.prefix) if metadata is not None else None
        if metadata is None:  # vLLM measures memory: there is no cache yet
            return x_NC
        state = self.kv_cache[BRANCH_STATE]
        state = state if is_conv_state_dim_first() else state.transpose(-1, -2)
        state = state[:, : weight.shape[0], : weight.shape[1] - 1]
        decodes, prefills = metadata.num_decode_tokens, metadata.num_prefill_tokens
        output = torch.zeros_like(x_NC)  # rows after the last token are padding
        if prefills:
            output[decodes : decodes + prefills] = causal_conv1d_fn(
                x_NC[decodes : decodes + prefills].transpose(0, 1),
                weight,
                bias,
                activation=None,
                conv_states=state,
                has_initial_state=metadata.has_initial_states_p,
                cache_indices=metadata.state_indices_tensor_p,
                metadata=metadata,
                query_start_loc=metadata.query_start_loc_p,
            ).transpose(0, 1)
        if decodes:
            output[:decodes] = causal_conv1d_update(
                x_NC[:decodes],
                state,
                weight,
                bias,
                None,
                conv_state_indices=metadata.state_indices_tensor_d,
                query_start_loc=metadata.query_start_loc_d,
                max_query_len=metadata.state_indices_tensor_d.size(-1),
            )
        return output


class HybridLayer(nn.Module):
    """A norm, the mixer, and the branch beside it where the layer has one."""

    def __init__(self, config: Mamba2HybridConfig, index: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        # vLLM wants another index in the name of each cache: attention's come after the last layer's.
        self.mixer = HybridMixer(config, vllm_config, f"{prefix}.{index}.mixer")
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.branch = None
        site = config.sites.get(index)
        if site is None:
            return
        heads, width = config.attention_shape
        self.branch = AttentionBranch(config.hidden_size, site, heads, width)
        self.attn = Attention(
            heads,
            width,
            1.0,
            num_kv_heads=heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.{config.num_hidden_layers + index}.attn",
        )

    def forward(self, hidden_ND: Tensor, residual_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the residual stream to add it to."""
        if residual_ND is None:
            residual_ND, hidden_ND = hidden_ND, self.norm(hidden_ND)
        else:
            hidden_ND, residual_ND = self.norm(hidden_ND, residual_ND)
        output_ND = self.mixer(hidden_ND)
        if self.branch is not None:
            output_ND = output_ND + self.branch(hidden_ND, self.mixer.convolve, self.attn)
        return output_ND, residual_ND


class Mamba2HybridModel(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            HybridLayer(config, index, vllm_config, f"{prefix}.layers") for index in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """Return the last hidden states (N,D)."""
        hidden, residual = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds, None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm_f(hidden, residual)[0]


class Mamba2HybridForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Mamba-2 language model with spliced attention heads."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr=RENAMED)
    allow_patterns_overrides = ["model*.safetensors"]  # earlier exports have one more, reference.safetensors

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a layer's three states."""
        return state_shapes(vllm_config.model_config.hf_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the three states."""
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return how vLLM copies each state."""
        return *MambaStateCopyFuncCalculator.mamba2_state_copy_func(), get_conv_copy_spec

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.backbone = Mamba2HybridModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "backbone"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.backbone.embeddings)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens."""
        return self.backbone.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the last hidden states (N,D). Positions are not used: neither scan nor branch has any."""
        return self.backbone(input_ids, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of hidden states."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load an export's tensors. The columns of replaced heads are 0 in an export; they are set to 0 in any case."""
        if self.config.tie_word_embeddings:
            weights = ((name, tensor) for name, tensor in weights if not name.startswith("lm_head."))
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        for index, site in self.config.sites.items():
            self.backbone.layers[index].mixer.out_proj.weight.data[:, site.replaced_channels] = 0
        return loaded
