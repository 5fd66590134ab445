"""Make the base `mamba1`: a Mamba-1 that begins with the weights of checkpoints/pico-far and is then trained.

    python -m bench.studies.head_choice.mamba1

No small Mamba-1 learned to retrieve from random weights (paper/LOG.md). Here each group of channels does what one head
of the Mamba-2 does. All of a Mamba-2 mixer can be expressed, except for the norm behind its gate:

- x, B and C of the Mamba-2, of its convolution and SiLU, become channels of the Mamba-1; `x_proj` passes B and C on.
- dt has no SiLU in the Mamba-2, so two channels carry it: silu(dt) - silu(-dt) = dt.
- The heads' decay, skip and bias of dt are repeated for each of their channels.
- The norm divides by a number that differs for every token. The constant that is closest on documents takes its place.

The channels for B, C and dt have a gate of 0, so no output. Training with a KL term to the Mamba-2 mends what the
constant breaks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerBase

from bench.common import FAR, load, quiet_on_one_thread
from bench.studies.experiment import train_and_save
from surgery.data.encoding import encode
from surgery.data.generated import GeneratedStream
from surgery.recipe import Train

RETRIEVAL = {"task": "kv_retrieval", "pairs": (2, 24), "questions": 8, "weights": {"answer": 1.0, "base_kl": 0.5}}
TRAIN = Train(
    steps=300,
    control=False,
    sources=[
        {**RETRIEVAL, "filler": (0, 12), "rows": 6},
        {**RETRIEVAL, "rows": 2},
        {"task": "closed_book", "rows": 8, "weights": {"base_kl": 1.0}},
        {"task": "statement", "rows": 6, "weights": {"base_kl": 1.0}},
        {"task": "sentence", "rows": 8, "weights": {"base_kl": 1.0}},
    ],
    optimizer={"lr": 1e-3, "warmup": 20},
)


def make(folder: Path) -> None:
    """Convert checkpoints/pico-far, train the result on its documents, and write the checkpoint."""
    teacher, tokenizer = load(FAR)
    model = from_mamba2(teacher, norm_scales(teacher, tokenizer))
    train_and_save(model, tokenizer, TRAIN, teacher, folder)


@torch.no_grad()
def norm_scales(model: Mamba2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """For each layer, the constant that brings its gated norm's input closest to the norm's output without weights."""
    sums = [[0.0, 0.0] for _ in model.backbone.layers]

    def hook(index: int) -> object:
        def add(norm: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
            gated = inputs[0].float() * F.silu(inputs[1].float())
            normed = F.rms_norm(gated, gated.shape[-1:], eps=norm.variance_epsilon)
            sums[index][0] += float((gated * normed).sum())
            sums[index][1] += float((gated * gated).sum())

        return add

    hooks = [
        block.mixer.norm.register_forward_pre_hook(hook(index)) for index, block in enumerate(model.backbone.layers)
    ]
    for index, source in enumerate(TRAIN.sources):
        for document in GeneratedStream(source, None, 0, index).step(0):
            model(encode([document], tokenizer).input_ids)
    for handle in hooks:
        handle.remove()
    return [product / square for product, square in sums]


@torch.no_grad()
def from_mamba2(model: Mamba2ForCausalLM, scales: list[float]) -> MambaForCausalLM:
    """Mamba-1 with the weights of a Mamba-2. Its inner width is the next multiple of the hidden size that is enough.

    Args:
        model: with one group, and without biases in its projections.
        scales: for each layer, the constant in place of the norm behind the gate.
    """
    config = model.config
    inner, state, heads = config.num_heads * config.head_dim, config.state_size, config.num_heads
    used = inner + 2 * state + 2 * heads
    expand = -(-used // config.hidden_size)
    names = ("vocab_size", "hidden_size", "state_size", "num_hidden_layers", "layer_norm_epsilon", "conv_kernel")
    names += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    new = MambaForCausalLM(
        MambaConfig(**{name: getattr(config, name) for name in names}, expand=expand, time_step_rank=heads)
    )
    new.config.channels_per_head = config.head_dim
    new.backbone.embeddings.weight.copy_(model.backbone.embeddings.weight)
    new.backbone.norm_f.weight.copy_(model.backbone.norm_f.weight)
    one, per_channel = torch.eye(heads), lambda values: values.repeat_interleave(config.head_dim, 0)
    for old_block, block, scale in zip(model.backbone.layers, new.backbone.layers, scales, strict=True):
        old, mixer = old_block.mixer, block.mixer
        for parameter in mixer.parameters():
            parameter.zero_()
        block.norm.weight.copy_(old_block.norm.weight)
        gate, x_B_C, dt = old.in_proj.weight.split([inner, inner + 2 * state, heads])
        mixer.in_proj.weight[:used] = torch.cat([x_B_C, dt, -dt])
        mixer.in_proj.weight[expand * config.hidden_size :][:inner] = gate
        mixer.conv1d.weight[: inner + 2 * state] = old.conv1d.weight
        mixer.conv1d.bias[: inner + 2 * state] = old.conv1d.bias
        mixer.conv1d.weight[inner + 2 * state :, 0, -1] = 1.0
        mixer.x_proj.weight[heads:, inner : inner + 2 * state] = torch.eye(2 * state)
        mixer.x_proj.weight[:heads, inner + 2 * state : used] = torch.cat([one, -one], 1)
        mixer.dt_proj.weight[:inner] = per_channel(one)
        mixer.dt_proj.bias[:inner] = per_channel(old.dt_bias)
        mixer.A_log[:inner] = per_channel(old.A_log)[:, None]
        mixer.D[:inner] = per_channel(old.D)
        mixer.out_proj.weight[:, :inner] = old.out_proj.weight * old.norm.weight * scale
    return new.eval()


if __name__ == "__main__":
    from bench.studies.head_choice.bases import BASES

    quiet_on_one_thread()
    if BASES["mamba1"].folder.exists():
        sys.exit(f"{BASES['mamba1'].folder} exists already.")
    make(BASES["mamba1"].folder)
