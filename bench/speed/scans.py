"""Compare the scans of `surgery.models.torch_scans` with those of transformers, without kernels, in one process.

    OMP_NUM_THREADS=1 python -m bench.speed.scans

Prints the CPU seconds of one forward and backward pass with either scan, and their ratio, by model and number of
tokens. The models have random weights.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, PreTrainedConfig, PreTrainedModel

from bench.common import markdown_table, quiet_on_one_thread
from surgery.models.torch_scans import torch_scans

VOCABULARY = 1000
MODELS: dict[str, tuple[PreTrainedConfig, int, tuple[int, ...]]] = {
    "Mamba-1, 4 layers of width 128, state 16": (
        MambaConfig(hidden_size=128, num_hidden_layers=4, state_size=16, vocab_size=VOCABULARY),
        8,
        (32, 64, 128, 256),
    ),
    "Mamba-2, 4 layers of 8 heads of 32, state 32 (pico-far)": (
        Mamba2Config(
            hidden_size=128,
            num_hidden_layers=4,
            num_heads=8,
            head_dim=32,
            state_size=32,
            n_groups=1,
            chunk_size=16,
            vocab_size=VOCABULARY,
        ),
        8,
        (128, 512, 2048),
    ),
    "Mamba-2, 1 layer of 24 heads of 64, state 128 (mamba2-130m)": (
        Mamba2Config(
            hidden_size=768,
            num_hidden_layers=1,
            num_heads=24,
            head_dim=64,
            state_size=128,
            n_groups=1,
            chunk_size=256,
            vocab_size=VOCABULARY,
        ),
        1,
        (512, 2048, 8192),
    ),
}


def seconds(model: PreTrainedModel, ids: torch.Tensor, ours: bool) -> float:
    """CPU seconds of the faster of two passes."""
    times = []
    for _ in range(2):
        model.zero_grad()
        began = time.process_time()
        with torch_scans(model) if ours else nullcontext():
            model(ids, labels=ids, use_cache=False).loss.backward()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    quiet_on_one_thread()
    rows = []
    for name, (config, documents, lengths) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        for length in lengths:
            ids = torch.randint(0, VOCABULARY, (documents, length))
            stock, ours = (seconds(model, ids, which) for which in (False, True))
            rows.append([name, f"{documents} x {length}", f"{stock:.2f}", f"{ours:.2f}", f"{stock / ours:.1f}"])
    print(markdown_table(["model", "tokens", "transformers, s", "ours, s", "ratio"], rows))
