"""Make a checkpoint of real shape whose function is known, and run the recipe for that shape on it.

    python -m bench.speed.real_shape runs/real-shape            (make real-shape)

Tests cannot download weights, and locating refuses a random model because it retrieves nothing. Here the shipped pico
model is planted in the shape of state-spaces/mamba2-130m: 24 layers, 129M parameters, files of mamba_ssm's own format.
The logits are those of the pico model, so the expected heads are known. Then recipes/mamba2-130m.yaml runs on it, with
another path of the model and 3 steps of each stage.

The planting is exact. A residual stream that is padded with zeros keeps its RMS when it is scaled by
sqrt(new / old width). Heads are copied until the inner width is filled, so that the gated norm's mean square stays; the
copies' columns of `out_proj` are zero. So are those of all heads in the layers above, whose other weights are random.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from bench.common import ROOT, SHIPPED, parser
from surgery.models.loading import load_model
from surgery.recipe import Base


@dataclass(frozen=True)
class Shape:
    """Shape of the planted model; state-spaces/mamba2-130m by default. `vocab_size` is padded to a multiple of 16."""

    d_model: int = 768
    n_layer: int = 24
    d_state: int = 128
    headdim: int = 64
    vocab_size: int = 50277


def plant(folder: Path, shape: Shape | None = None, seed: int = 0) -> None:
    """Write `config.json` and `pytorch_model.bin` in mamba_ssm's format, and the pico model's tokenizer."""
    shape = shape or Shape()
    base = load_model(Base(model=str(SHIPPED)))
    weights = planted(base.state_dict(), base.config, shape, torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "d_model": shape.d_model,
        "d_intermediate": 0,
        "n_layer": shape.n_layer,
        "vocab_size": shape.vocab_size,
        "ssm_cfg": {"layer": "Mamba2", "d_state": shape.d_state, "headdim": shape.headdim},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin")
    for file in SHIPPED.glob("tokenizer*"):
        shutil.copy(file, folder)


def planted(
    state: Mapping[str, Tensor], pico: PreTrainedConfig, shape: Shape, rng: torch.Generator
) -> dict[str, Tensor]:
    """The pico model's tensors in the larger shape, under mamba_ssm's names."""
    rows = math.ceil(shape.vocab_size / 16) * 16
    grow = math.sqrt(shape.d_model / pico.hidden_size)
    embedding = torch.zeros(rows, shape.d_model)
    embedding[: pico.vocab_size, : pico.hidden_size] = state["backbone.embeddings.weight"] * grow
    weights = {
        "backbone.embedding.weight": embedding,
        "backbone.norm_f.weight": _pad(state["backbone.norm_f.weight"] / grow**2, shape.d_model),
        "lm_head.weight": embedding,
    }
    for layer in range(shape.n_layer):
        prefix = f"backbone.layers.{layer}."
        if layer < pico.num_hidden_layers:
            own = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            made = _planted_layer(own, pico, shape, grow)
        else:
            made = _idle_layer(shape, pico.conv_kernel, rng)
        weights |= {prefix + name: tensor for name, tensor in made.items()}
    return weights


def _pad(x: Tensor, *sizes: int) -> Tensor:
    """Pad the first dimensions with zeros at the end."""
    padded = torch.zeros(*sizes, *x.shape[len(sizes) :])
    padded[tuple(slice(0, n) for n in x.shape[: len(sizes)])] = x
    return padded


def _planted_layer(own: Mapping[str, Tensor], pico: PreTrainedConfig, shape: Shape, grow: float) -> dict[str, Tensor]:
    """Tensors of one layer. Head h of the pico model is head h here, and copied to h + H, h + 2H, ..."""
    H, P, N = pico.num_heads, pico.head_dim, pico.state_size
    inner, heads = 2 * shape.d_model, 2 * shape.d_model // shape.headdim
    assert pico.n_groups == 1 and heads % H == 0 and shape.headdim % P == 0, "copies must fill the width"

    def channels(x: Tensor) -> Tensor:
        """(H*P,...) -> (inner,...): every head's channels, repeated within a head and over the copies."""
        wide = x.unflatten(0, (H, P)).repeat(heads // H, shape.headdim // P, *[1] * (x.ndim - 1))
        return wide.flatten(0, 1)

    def inputs(x: Tensor) -> Tensor:
        """Rows of [x | B | C] in the new layout."""
        x, B, C = x.split([H * P, N, N])
        return torch.cat([channels(x), _pad(B, shape.d_state), _pad(C, shape.d_state)])

    gate, mixed, step = own["mixer.in_proj.weight"].split([H * P, H * P + 2 * N, H])
    in_proj = torch.cat([channels(gate), inputs(mixed), step.repeat(heads // H, 1)])
    out_proj = torch.zeros(shape.d_model, inner)
    for head in range(H):
        columns = own["mixer.out_proj.weight"][:, head * P : (head + 1) * P] * grow
        out_proj[: pico.hidden_size, head * shape.headdim : head * shape.headdim + P] = columns
    return {
        "norm.weight": _pad(own["norm.weight"] / grow, shape.d_model),
        "mixer.in_proj.weight": _pad(in_proj.T, shape.d_model).T.contiguous(),
        "mixer.conv1d.weight": inputs(own["mixer.conv1d.weight"]),
        "mixer.conv1d.bias": inputs(own["mixer.conv1d.bias"]),
        "mixer.norm.weight": channels(own["mixer.norm.weight"]),
        "mixer.out_proj.weight": out_proj,
        **{f"mixer.{name}": own[f"mixer.{name}"].repeat(heads // H) for name in ("A_log", "D", "dt_bias")},
    }


def _idle_layer(shape: Shape, kernel: int, rng: torch.Generator) -> dict[str, Tensor]:
    """A layer that adds nothing: random, but its `out_proj` is zero."""
    inner, heads = 2 * shape.d_model, 2 * shape.d_model // shape.headdim
    channels = inner + 2 * shape.d_state
    return {
        "norm.weight": torch.ones(shape.d_model),
        "mixer.in_proj.weight": torch.randn(inner + channels + heads, shape.d_model, generator=rng)
        * shape.d_model**-0.5,
        "mixer.conv1d.weight": torch.randn(channels, 1, kernel, generator=rng) * kernel**-0.5,
        "mixer.conv1d.bias": torch.zeros(channels),
        "mixer.norm.weight": torch.ones(inner),
        "mixer.out_proj.weight": torch.zeros(shape.d_model, inner),
        "mixer.A_log": torch.empty(heads).uniform_(1, 16, generator=rng).log(),
        "mixer.D": torch.ones(heads),
        "mixer.dt_bias": torch.empty(heads).uniform_(-6, -2, generator=rng),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, run the recipe, print the measurements and write them to `real_shape.json`."""
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    folder = options.parse_args(arguments).folder
    plant(folder / "base")
    overrides = [f"base.model={folder / 'base'}", f"base.tokenizer={folder / 'base'}"]
    overrides += ["train.read_steps=3", "train.steps=3"]
    command = [sys.executable, "-m", "surgery", "run", str(ROOT / "recipes" / "mamba2-130m.yaml"), *overrides]
    began = time.perf_counter()
    done = subprocess.run([*command, "--runs", str(folder), "--overwrite"], cwd=ROOT)
    if done.returncode:
        return done.returncode
    seconds = time.perf_counter() - began
    found = {"seconds": round(seconds), "overrides": overrides[2:], **_evidence(folder / "mamba2-130m")}
    (folder / "real_shape.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    return 0


def _evidence(run: Path) -> dict[str, Any]:
    """Read the results of the run: heads, seconds by stage, and the largest resident memory of its processes."""
    import resource

    results = json.loads((run / "results.json").read_text())
    stages = {p.stem: json.loads(p.read_text())["seconds"] for p in sorted((run / ".stages").glob("*.json"))}
    return {
        "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "heads": results["heads"],
        "step_zero_gap": results["step_zero_gap"],
        "seconds_by_stage": stages,
        "export": json.loads((run / "export" / "export.json").read_text()),
        "versions": results["versions"],
    }


if __name__ == "__main__":
    sys.exit(main())
