"""Compare the training scan of Mamba-1 with that of transformers, without kernels, in one process.

    OMP_NUM_THREADS=1 python -m bench.speed.mamba1

Prints the seconds of one forward and backward pass with either scan, and their ratio, by number of tokens. The model
has random weights, 4 layers of width 128 and a state of 16. A batch has 8 documents.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from transformers import MambaConfig, MambaForCausalLM

from bench.common import markdown_table, quiet_on_one_thread
from surgery.models.mamba1_scan import linear_backward

LENGTHS, ROWS, VOCABULARY = (32, 64, 128, 256), 8, 1000


def seconds(model: MambaForCausalLM, ids: torch.Tensor, ours: bool) -> float:
    """The faster of two passes."""
    times = []
    for _ in range(2):
        model.zero_grad()
        began = time.perf_counter()
        with linear_backward(model) if ours else nullcontext():
            model(ids, labels=ids, use_cache=False).loss.backward()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    quiet_on_one_thread()
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=128, num_hidden_layers=4, state_size=16, vocab_size=VOCABULARY)
    tiny = MambaForCausalLM(config).train()
    rows = []
    for length in LENGTHS:
        ids = torch.randint(0, VOCABULARY, (ROWS, length))
        stock, ours = (seconds(tiny, ids, which) for which in (False, True))
        rows.append([str(length), f"{stock:.2f}", f"{ours:.2f}", f"{stock / ours:.1f}"])
    print(markdown_table(["tokens", "transformers, s", "ours, s", "ratio"], rows))
