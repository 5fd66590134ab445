"""Make the base `nemotron_h`: a Nemotron-H that begins with the weights of checkpoints/pico-mamba2 and is then trained.

    python -m bench.studies.inserted.nemotron_h

Every SSM layer is followed by an MLP with random weights, which breaks the model. Training with a KL term to the
Mamba-2 mends it. Published Nemotron-H also have a few attention layers. This one has its only one before all other
layers, where no key is gathered yet (paper/INSERTED.md, the design `block`), so retrieval is left to the splice. Its
two heads share one key.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Mamba2ForCausalLM, NemotronHForCausalLM

from bench.common import RUNS, SHIPPED, load, quiet_on_one_thread
from bench.studies.experiment import train_and_save
from surgery.recipe import Train
from surgery.splice.insertion import nemotron_h_config

FOLDER = RUNS / "inserted" / "bases" / "nemotron_h"
TRAIN = Train(
    steps=300,
    control=False,
    sources=[
        {
            "task": "kv_retrieval",
            "pairs": (2, 24),
            "questions": 8,
            "rows": 8,
            "weights": {"answer": 1.0, "base_kl": 0.5},
        },
        {"task": "closed_book", "rows": 8, "weights": {"base_kl": 1.0}},
        {"task": "statement", "rows": 6, "weights": {"base_kl": 1.0}},
        {"task": "sentence", "rows": 8, "weights": {"base_kl": 1.0}},
    ],
    optimizer={"lr": 1e-3, "warmup": 20},
)


def make(folder: Path) -> None:
    """Convert checkpoints/pico-mamba2, train the result on its documents, and write the checkpoint."""
    teacher, tokenizer = load(SHIPPED)
    torch.manual_seed(0)
    model = with_mlps(teacher)
    train_and_save(model, tokenizer, TRAIN, teacher, folder)


@torch.no_grad()
def with_mlps(model: Mamba2ForCausalLM) -> NemotronHForCausalLM:
    """Return a Nemotron-H with random attention first, and the layers of a Mamba-2, a random MLP behind each."""
    config = nemotron_h_config(model.config)
    config.layers_block_type = ["full_attention", *["linear_attention", "mlp"] * model.config.num_hidden_layers]
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    new = NemotronHForCausalLM(config)
    for old_name, tensor in model.state_dict().items():
        name = old_name.replace("backbone.", "model.")
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"model.layers.{1 + 2 * int(layer)}.{rest}"
        new.state_dict()[name].copy_(tensor)
    for block in new.model.layers:
        if block.block_type != "linear_attention":
            for projection in block.mixer.children():
                if isinstance(projection, nn.Linear):
                    projection.weight.normal_(std=projection.in_features**-0.5)
    new.model.layers[0].mixer.o_proj.weight.mul_(0.05)  # the embeddings that it is added to are small
    return new.eval()


if __name__ == "__main__":
    quiet_on_one_thread()
    if FOLDER.exists():
        sys.exit(f"{FOLDER} exists already.")
    make(FOLDER)
