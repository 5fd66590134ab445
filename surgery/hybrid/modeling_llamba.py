"""Llamba, which transformers does not have: config, model and causal language model, with spliced heads or without.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. Configs
and tensor names are those of the published checkpoints (Bick et al., arXiv 2502.14458): Llama's blocks with a discrete
Mamba-2 instead of attention (arXiv 2408.10189),

    h_t = exp(-softplus(a_t)) h_{t-1} + x_t B_t^T        y_t = h_t C_t + D x_t

with one a_t a head, computed from the input: no step size, no A, no norm. State and decay are fp32 for weights of any
dtype.

Shape legend: B batch, T tokens, D model width, I inner width (H heads of P), G key heads, N state width, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.utils.generic import maybe_autocast

from .configuration_hybrid import HybridConfigMixin, is_whole, splice_sites
from .modeling_hybrid import (
    DonorAttention,
    HybridCausalLMMixin,
    HybridInitMixin,
    HybridMixerMixin,
    HybridModelMixin,
    LogitsMixin,
    RecordingMixin,
    SplicePass,
    masked,
)

BLOCK_NORM_EPSILON = 1e-5  # of the norms in a block; `norm_epsilon` is the final norm's
CONV_ACTIVATIONS = {"identity": nn.Identity, "silu": nn.SiLU, "swish": nn.SiLU}
MLP_DEFAULTS = {"intermediate_size": 14336, "bias": False, "act_fn": "silu"}
SSM_DEFAULTS = {
    "d_state": 64,
    "n_v_heads": 32,
    "n_qk_heads": 32,
    "d_conv": 4,
    "expand": 1,
    "chunk_size": 128,
    "activation": "identity",
    "bias": False,
    "conv_bias": True,
}


class LlambaConfig(HybridConfigMixin, PreTrainedConfig):
    """The published fields, `splice`, and transformers' usual names for both.

    Args:
        vocab_size: rounded up to a multiple of `pad_vocab_size_multiple`, as the tensors are.
        lm_head_bias: read where the embeddings are not tied.
        norm_epsilon: of the final norm; the blocks' is 1e-5.
        mlp_cfg: `intermediate_size`, `bias`, `act_fn`; missing keys take the 8B model's values.
        ssm_cfg: `d_state`, `n_v_heads`, `n_qk_heads`, `d_conv`, `expand`, `chunk_size`, `activation` (of the short
            convolution), `bias` (of the projections), `conv_bias`; likewise.

    Raises:
        ValueError: sizes that are no whole numbers, widths that do not divide, an unknown activation, or a `splice`
            that the model cannot have.
    """

    model_type = "llamba"
    takes_layers = True
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
        "layer_norm_epsilon": "norm_epsilon",
        "rms_norm_eps": "norm_epsilon",
    }

    vocab_size: int = 128256
    pad_vocab_size_multiple: int = 8
    d_model: int = 4096
    n_layer: int = 32
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    norm_epsilon: float = 1e-5
    mlp_cfg: dict | None = None
    ssm_cfg: dict | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    splice: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.mlp_cfg = {**MLP_DEFAULTS, **(self.mlp_cfg or {})}
        self.ssm_cfg = {**SSM_DEFAULTS, **(self.ssm_cfg or {})}
        self._check_widths()
        super().__post_init__(**kwargs)
        self.vocab_size += -self.vocab_size % self.pad_vocab_size_multiple

    def _check_widths(self) -> None:
        for name in ("d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand", "chunk_size"):
            value = self.ssm_cfg[name]
            if type(value) is not int or value < 1:
                raise ValueError(f"ssm_cfg.{name}: {value!r}. It needs a whole number of at least 1.")
        inner, heads, key_heads = self.expand * self.d_model, self.num_heads, self.n_groups
        if inner % heads:
            raise ValueError(f"ssm_cfg.n_v_heads: {heads} heads do not divide expand * d_model = {inner}")
        if heads % key_heads:
            raise ValueError(f"ssm_cfg.n_qk_heads: {key_heads} key heads do not divide n_v_heads = {heads}")
        if self.conv_activation not in CONV_ACTIVATIONS:
            known = ", ".join(CONV_ACTIVATIONS)
            raise ValueError(f"ssm_cfg.activation: {self.conv_activation!r} is unknown; known: {known}")

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer."""
        return self.cache_types(["linear_attention"] * self.n_layer)

    num_heads = property(lambda self: self.ssm_cfg["n_v_heads"])
    head_dim = property(lambda self: self.expand * self.d_model // self.num_heads)
    n_groups = property(lambda self: self.ssm_cfg["n_qk_heads"])
    state_size = property(lambda self: self.ssm_cfg["d_state"])
    expand = property(lambda self: self.ssm_cfg["expand"])
    conv_kernel = property(lambda self: self.ssm_cfg["d_conv"])
    chunk_size = property(lambda self: self.ssm_cfg["chunk_size"])
    use_bias = property(lambda self: self.ssm_cfg["bias"])
    use_conv_bias = property(lambda self: self.ssm_cfg["conv_bias"])
    conv_activation = property(lambda self: self.ssm_cfg["activation"])
    intermediate_size = property(lambda self: self.mlp_cfg["intermediate_size"])
    mlp_bias = property(lambda self: self.mlp_cfg["bias"])
    hidden_act = property(lambda self: self.mlp_cfg["act_fn"])


def scan_step(
    x_BHP: Tensor, key_BGN: Tensor, query_BGN: Tensor, log_decay_BH: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one token: return (B,H,P) without the skip, and the new state (B,H,P,N)."""
    shared = x_BHP.shape[1] // key_BGN.shape[1]
    key_BHN, query_BHN = (k.repeat_interleave(shared, dim=1) for k in (key_BGN, query_BGN))
    state_BHPN = state_BHPN * log_decay_BH.exp()[..., None, None] + x_BHP[..., None] * key_BHN[:, :, None]
    return torch.einsum("bhpn,bhn->bhp", state_BHPN, query_BHN), state_BHPN


def chunked_scan(
    x_BTHP: Tensor,
    key_BTGN: Tensor,
    query_BTGN: Tensor,
    log_decay_BTH: Tensor,
    state_BHPN: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run many tokens as matrix products: return (B,T,H,P) without the skip, and the last state (B,H,P,N).

    Tokens of one chunk interact directly, and a state is carried between chunks (arXiv 2405.21060, section 6). The
    largest intermediate has one L x L matrix a head and chunk.

    Args:
        log_decay_BTH: logarithm of the factor on the state at each token, not above 0; -inf where a document begins.
        state_BHPN: the state before the first token.
    """
    T, G = x_BTHP.shape[1], key_BTGN.shape[2]
    size = min(chunk_size, T)
    # The last chunk is filled with tokens without input and decay, which do not change the state.
    x, key, query = (F.pad(v, (0, 0, 0, 0, 0, -T % size)) for v in (x_BTHP, key_BTGN, query_BTGN))
    x_BCGRLP = x.unflatten(1, (-1, size)).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5)
    key_BCGLN, query_BCGLN = (v.unflatten(1, (-1, size)).transpose(2, 3) for v in (key, query))
    log_decay = F.pad(log_decay_BTH, (0, 0, 0, -T % size)).unflatten(1, (-1, size)).unflatten(3, (G, -1))
    log_BCGRL = log_decay.permute(0, 1, 3, 4, 2)

    decay_BCGRLL = _decays(log_BCGRL)
    scores_BCGLL = query_BCGLN @ key_BCGLN.transpose(-1, -2)
    within = (scores_BCGLL[:, :, :, None] * decay_BCGRLL) @ x_BCGRLP

    left_BCGRLP = x_BCGRLP * decay_BCGRLL[..., -1, :, None]
    added_BCGRPN = torch.einsum("bcgrlp,bcgln->bcgrpn", left_BCGRLP, key_BCGLN)
    since_BCGRL = log_BCGRL.cumsum(-1).exp()
    state, before = state_BHPN.unflatten(1, (G, -1)), []
    for added_BGRPN, whole_BGR in zip(added_BCGRPN.unbind(1), since_BCGRL[..., -1].unbind(1), strict=True):
        before.append(state)
        state = state * whole_BGR[..., None, None] + added_BGRPN
    carried = torch.einsum("bcgln,bcgrpn->bcgrlp", query_BCGLN, torch.stack(before, 1)) * since_BCGRL[..., None]

    y_BTHP = (within + carried).permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :T]
    return y_BTHP, state.flatten(1, 2)


def _decays(log_XL: Tensor) -> Tensor:
    """(...,L) -> (...,L,L): at [t,s] the factor at token t on the input of token s; 0 above the diagonal.

    Each sum starts at s. A difference of two sums from the chunk's start would lose the digits of a weak decay after a
    strong one. The mask comes before the exponential, so that no gradient is NaN.
    """
    L = log_XL.shape[-1]
    later = torch.ones(L, L, dtype=torch.bool, device=log_XL.device).tril(-1)
    sums_XLL = log_XL[..., :, None].expand(*log_XL.shape, L).masked_fill(~later, 0).cumsum(-2)
    return sums_XLL.masked_fill_(later.T, -torch.inf).exp_()


class LlambaMixer(nn.Module):
    """The discrete Mamba-2. Rows of `in_proj`: [x | B | C | z | a]; channels of `conv1d`: [x | B | C]."""

    def __init__(self, config: LlambaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.chunk_size = layer_idx, config.chunk_size
        self.num_heads, self.head_dim, self.n_groups = config.num_heads, config.head_dim, config.n_groups
        self.ssm_state_size, self.conv_kernel_size = config.state_size, config.conv_kernel
        self.intermediate_size = self.num_heads * self.head_dim
        self.key_size = self.n_groups * self.ssm_state_size
        self.conv_dim = self.intermediate_size + 2 * self.key_size
        rows = self.conv_dim + self.intermediate_size + self.num_heads
        self.in_proj = nn.Linear(config.d_model, rows, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, self.conv_kernel_size, groups=self.conv_dim, bias=config.use_conv_bias
        )
        self.act = CONV_ACTIVATIONS[config.conv_activation]()
        self.z_bias = None if config.use_bias else nn.Parameter(torch.zeros(self.intermediate_size))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.out_proj = nn.Linear(self.intermediate_size, config.d_model, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D).

        Args:
            cache: a transformers Cache; updated in place. Any number of new tokens may follow a filled one.
            attention_mask: (B,T) of the new tokens, 0 on padding; None when there is none.
        """
        u_BTD = masked(hidden_states, attention_mask)
        state = cache.get_recurrent_state(self.layer_idx) if cache is not None else None
        mixed, gate, decay = self.in_proj(u_BTD).split([self.conv_dim, self.intermediate_size, self.num_heads], dim=-1)
        # Biases of the projection and of the convolution are not 0 on padding.
        mixed = self._convolve(masked(mixed, attention_mask), cache)
        mixed = masked(mixed, attention_mask)
        with maybe_autocast(device_type=u_BTD.device.type, enabled=False):
            y_BTHP, state = self._recur(mixed, decay, state)
            if self.z_bias is not None:
                gate = gate + self.z_bias
            y_BTI = y_BTHP.flatten(2) * F.silu(gate.to(y_BTHP.dtype))
        if cache is not None:
            cache.update_recurrent_state(state, layer_idx=self.layer_idx)
        return self.out_proj(y_BTI.to(u_BTD.dtype))

    def _convolve(self, mixed_BTI: Tensor, cache: Any) -> Tensor:
        """Run the short causal convolution over [x|B|C]."""
        mixed_BIT, T = mixed_BTI.transpose(1, 2), mixed_BTI.shape[1]
        if cache is not None:
            mixed_BIT = cache.update_conv_state(mixed_BIT, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        past = self.conv_kernel_size - 1
        mixed_BIT = F.pad(mixed_BIT, (past, 0))[..., -(past + T) :]
        return self.act(self.conv1d(mixed_BIT)).transpose(1, 2)

    def _recur(self, mixed_BTI: Tensor, decay_BTH: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the recurrence and the skip in fp32 at least: (B,T,H,P) and the last state (B,H,P,N)."""
        dtype = torch.promote_types(mixed_BTI.dtype, torch.float32)
        x, key, query = mixed_BTI.to(dtype).split([self.intermediate_size, self.key_size, self.key_size], dim=-1)
        x_BTHP = x.unflatten(-1, (self.num_heads, self.head_dim))
        key_BTGN, query_BTGN = (v.unflatten(-1, (self.n_groups, self.ssm_state_size)) for v in (key, query))
        log_decay_BTH = -F.softplus(decay_BTH.to(dtype))
        if state is None:
            state = x_BTHP.new_zeros(x_BTHP.shape[0], self.num_heads, self.head_dim, self.ssm_state_size)
        if x_BTHP.shape[1] == 1:
            y_BHP, state = scan_step(x_BTHP[:, 0], key_BTGN[:, 0], query_BTGN[:, 0], log_decay_BTH[:, 0], state)
            y_BTHP = y_BHP[:, None]
        else:
            y_BTHP, state = chunked_scan(x_BTHP, key_BTGN, query_BTGN, log_decay_BTH, state, self.chunk_size)
        return y_BTHP + self.D[:, None] * x_BTHP, state

    def initialize(self) -> None:
        """Set initial values of the parameters that transformers cannot initialise."""
        init.ones_(self.D)
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))
        if self.z_bias is not None:
            init.zeros_(self.z_bias)


class LlambaHybridMixer(HybridMixerMixin, LlambaMixer):
    """`LlambaMixer` with a branch where the config splices one."""

    bypassed = ()


class DonorMixer(nn.Module):
    """A Transformer layer's attention instead of an SSM mixer: no scan and no state, keys and values in the cache."""

    def __init__(self, config: Any, site: dict[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.attention = DonorAttention(config, site, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D)."""
        return self.attention(hidden_states, cache, splice_pass or SplicePass(attention_mask))[0]


class LlambaBlock(GradientCheckpointingLayer):
    """Llama's block with another mixer."""

    def __init__(self, config: LlambaConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.d_model, eps=BLOCK_NORM_EPSILON)
        site = splice_sites(config.splice).get(layer_idx)
        if site is not None and is_whole(site):
            self.mixer = DonorMixer(config, site, layer_idx)
        else:
            self.mixer = LlambaHybridMixer(config, layer_idx)
        self.post_attention_layernorm = LlamaRMSNorm(config.d_model, eps=BLOCK_NORM_EPSILON)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D); the mask is of the new tokens."""
        mixed = self.mixer(self.input_layernorm(hidden_states), cache=cache, attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlambaPreTrainedModel(HybridInitMixin, PreTrainedModel):
    """Flags and initialisation common to all classes."""

    config_class = LlambaConfig
    base_model_prefix = "backbone"
    _keep_in_fp32_modules_strict = {"D"}
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlambaBlock"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaMixer):
            module.initialize()


class PlainLlambaModel(LlambaPreTrainedModel):
    """The forward below `LlambaModel`, which prepares its arguments."""

    def __init__(self, config: LlambaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(LlambaBlock(config, index) for index in range(config.n_layer))
        self.final_layernorm = LlamaRMSNorm(config.d_model, eps=config.norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """(B,T,D) -> (B,T,D). There are no positions; `generate` passes `position_ids` all the same."""
        if isinstance(attention_mask, dict):  # made by `generate` for a cache that compiles
            mask = attention_mask.get("linear_attention")
        else:
            mask = create_recurrent_attention_mask(self.config, inputs_embeds, attention_mask, cache)
        hidden, block_inputs = inputs_embeds, []
        for block in self.layers:
            block_inputs.append(hidden)
            hidden = block(hidden, cache=cache, attention_mask=mask, **kwargs)
        hidden = self.final_layernorm(hidden)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            cache=cache if use_cache else None,
            hidden_states=(*block_inputs, hidden) if output_hidden_states else None,
        )


class LlambaModel(HybridModelMixin, RecordingMixin, PlainLlambaModel):
    """Llamba without its head."""


class LlambaForCausalLM(HybridCausalLMMixin, LogitsMixin, LlambaPreTrainedModel, GenerationMixin):
    """The Llamba language model; with `config.splice`, a hybrid."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}

    def __init__(self, config: LlambaConfig) -> None:
        super().__init__(config)
        self.backbone = LlambaModel(config)
        self.lm_head = nn.Linear(
            config.d_model, config.vocab_size, bias=config.lm_head_bias and not config.tie_embeddings
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """As transformers', rounded up to `pad_vocab_size_multiple` too, so that the result loads again."""
        resizes = new_num_tokens is not None or pad_to_multiple_of is not None
        if resizes and isinstance(pad_to_multiple_of, int | None):  # transformers refuses anything else
            pad_to_multiple_of = math.lcm(pad_to_multiple_of or 1, self.config.pad_vocab_size_multiple)
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _supports_default_dynamic_cache(self) -> bool:
        """Return False without attention layers: `generate` would ask its cache for a length, which raises."""
        return bool(self.config.splice)


__all__ = ["LlambaConfig", "LlambaForCausalLM", "LlambaModel", "LlambaPreTrainedModel"]
