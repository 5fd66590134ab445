"""Hybrids from vLLM's own model classes: the SSM mixers of a family get attention branches.

A spliced layer holds an SSM state and paged keys and values. The branch's convolution keeps its past in one more state
of the mixer. All SSM layers have that state, so that all have the same pages.

Shape legend: N tokens of all requests, D model width, C channels, I inner width, R width of [dt | B | C].
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba import mamba_mixer
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.mamba import MambaForCausalLM
from vllm.model_executor.models.mamba2 import Mamba2ForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.zamba2 import Zamba2ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from .branch import AttentionBranch, branch_of
from .config import HybridConfig
from .scan import selective_scan, selective_state_update
from .splice import Site


def branch_state_shape(config: HybridConfig) -> tuple[int, int]:
    """Return the shape of the state that a branch's convolution adds to a mixer's."""
    channels, past = config.conv_state_shape()
    return (channels, past) if is_conv_state_dim_first() else (past, channels)


class BranchMixin(MambaBase):
    """Put before a mixer class of vLLM: adds a branch's output to the mixer's, and keeps its convolution's state."""

    attention: AttentionBranch | None

    @classmethod
    def take_over(cls, mixer: Any, config: Any, layer: int, vllm_config: VllmConfig) -> None:
        """Turn a mixer that vLLM's model has built into one of this class, with the layer's branch if it has one."""
        mixer.__class__ = cls
        mixer.branch_state = branch_state_shape(config)
        mixer.attention = None
        site: Site | None = config.sites.get(layer)
        if site is None:
            return
        ranks = get_tensor_model_parallel_world_size()
        heads, width = config.attention_shape(ranks)  # every process holds the whole branch
        mixer.attention = branch_of(config.hidden_size, site, heads, width)
        mixer.attend = Attention(
            heads,
            width,
            1.0,
            num_kv_heads=heads,
            cache_config=vllm_config.cache_config,
            # vLLM wants one number in the name of a cache, and no number twice. Families use less than two for a layer.
            prefix=f"branches.{2 * config.num_hidden_layers + layer}.attn",
        )

    def silence(self, channels: list[int]) -> None:
        """Set the output projection's columns of replaced heads to 0; `channels` count over all processes."""
        weight = self.out_proj.weight
        first = get_tensor_model_parallel_rank() * weight.shape[1]
        columns = [channel - first for channel in channels if first <= channel < first + weight.shape[1]]
        weight.data[:, columns] = 0

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the mixer's states and of the branch's."""
        return (*super().get_state_shape(), self.branch_state)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the mixer's states and of the branch's, which is that of the mixer's convolution."""
        dtypes = super().get_state_dtype()
        return (*dtypes, dtypes[0])

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return the spec without checkpoints inside a prompt: `MambaMixer2` writes one of its own states alone.

        So vLLM ends a step at each block of a prompt that it caches, and every state is complete there.
        """
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def convolve(self, x_NC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a branch's causal convolution to the new tokens of every request, and update its state."""
        metadata = get_forward_context().attn_metadata
        metadata = metadata.get(self.prefix) if metadata is not None else None
        if metadata is None:  # vLLM measures memory: there is no cache yet
            return x_NC
        state = self.kv_cache[-1]
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


class HybridMixer2(BranchMixin, MambaMixer2):
    """`MambaMixer2` with a branch."""

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        """(N,D) -> (N,D)."""
        output_ND = super().forward(hidden_states, mup_vector)
        if self.attention is None:
            return output_ND
        return output_ND + self.attention(hidden_states, self.convolve, self.attend)


class HybridMixer1(BranchMixin, MambaMixer):
    """`MambaMixer` with a branch, which may read the input and the output of `x_proj`."""

    @classmethod
    def take_over(cls, mixer: Any, config: Any, layer: int, vllm_config: VllmConfig) -> None:
        """As of `BranchMixin`. On the CPU it also sets the kernels: vLLM's mixer calls those of GPUs."""
        super().take_over(mixer, config, layer, vllm_config)
        if current_platform.is_cpu() and not hasattr(torch.ops._C, "selective_scan_fwd"):
            mamba_mixer.selective_scan_fn = selective_scan
            mamba_mixer.selective_state_update = selective_state_update
            mixer.is_lora_enabled = True  # the mixer then makes inputs contiguous, which oneDNN needs too
            # The mixer reads this weight itself. In bf16, vLLM would pack it for matrix products and remove it.
            mixer.conv1d.quant_method.process_weights_after_loading = lambda layer: None
        if mixer.attention is not None:
            mixer.x_proj.register_forward_hook(mixer.record)

    def record(self, module: Any, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        """Keep input (N,I) and output (N,R) of `x_proj`."""
        self.seen.append((inputs[0], outputs[0]))

    def forward(self, hidden_states: Tensor, output: Tensor) -> None:
        """(N,D) -> `output` (N,D), in place."""
        self.seen: list[tuple[Tensor, Tensor]] = []
        super().forward(hidden_states, output)
        if self.attention is None or not self.seen:  # vLLM measures memory
            return
        padding = hidden_states.shape[0] - sum(len(x) for x, _ in self.seen)
        # The mixer reads prompts first. In the batch they are last.
        parts = zip(*reversed(self.seen), strict=True)
        streams = tuple(F.pad(torch.cat([x.reshape(len(x), -1) for x in part]), (0, 0, 0, padding)) for part in parts)
        output += self.attention(hidden_states, self.convolve, self.attend, streams)


class HybridModelMixin:
    """Put before a family's causal language model of vLLM: its mixers get the branches of `config.splice`."""

    is_hybrid, is_attention_free = True, False
    allow_patterns_overrides = ["model*.safetensors"]  # earlier exports have one more, reference.safetensors

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        for name, module in list(self.named_modules()):
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True  # the branch's convolution reads the metadata of a step
            if isinstance(module, (MambaMixer, MambaMixer2)):
                hybrid = HybridMixer1 if isinstance(module, MambaMixer) else HybridMixer2
                hybrid.take_over(module, config, layer_of(name), vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a mixer's states and of the branch's."""
        shapes = super().get_mamba_state_shape_from_config(vllm_config)
        return (*shapes, branch_state_shape(vllm_config.model_config.hf_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Return the dtypes of a mixer's states and of the branch's."""
        dtypes = super().get_mamba_state_dtype_from_config(vllm_config)
        return (*dtypes, dtypes[0])

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return what copies each state to another block. vLLM leaves out a state that has none."""
        return (*super().get_mamba_state_copy_func(), get_conv_copy_spec)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load an export's tensors. The columns of replaced heads are 0 in an export; they are set to 0 in any case."""
        tied = self.config.tie_word_embeddings
        loaded = super().load_weights(
            (self.stored_name(name), tensor) for name, tensor in weights if not (tied and name.startswith("lm_head."))
        )
        if (
            missing := {name for name, _ in self.named_parameters()} - loaded
        ):  # vLLM itself does not look at Linear layers
            raise ValueError(f"ssm-surgery-vllm: the export has no weights for {', '.join(sorted(missing)[:5])}")
        for name, module in self.named_modules():
            if isinstance(module, BranchMixin) and module.attention is not None:
                module.silence(self.config.sites[layer_of(name)].replaced_channels)
        return loaded

    @staticmethod
    def stored_name(name: str) -> str:
        """Return the name of a tensor in checkpoints of the base, which vLLM's class reads."""
        return name


def layer_of(name: str) -> int:
    """Return the index of the layer that a module belongs to."""
    return int(re.search(r"\blayers\.(\d+)\.", name)[1])


class Mamba2HybridForCausalLM(HybridModelMixin, Mamba2ForCausalLM, IsHybrid):
    """Mamba-2 with attention branches."""


class MambaHybridForCausalLM(HybridModelMixin, MambaForCausalLM, IsHybrid):
    """Mamba-1 with attention branches."""


class FalconMambaHybridForCausalLM(HybridModelMixin, MambaForCausalLM, IsHybrid):
    """Falcon-Mamba with attention branches."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        config.model_type = config.family  # by which vLLM's class knows a Falcon-Mamba
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class NemotronHHybridForCausalLM(HybridModelMixin, NemotronHForCausalLM):
    """Nemotron-H with attention branches."""


class GraniteHybridForCausalLM(HybridModelMixin, GraniteMoeHybridForCausalLM):
    """Granite 4 with attention branches."""

    @staticmethod
    def stored_name(name: str) -> str:
        """Return the name of a tensor in Granite's checkpoints, where experts have other names than in transformers."""
        for new, old in (
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        ):
            name = name.replace(".block_sparse_moe" + new, ".block_sparse_moe" + old)
        return name


class Zamba2HybridForCausalLM(HybridModelMixin, Zamba2ForCausalLM):
    """Zamba2 with attention branches."""
