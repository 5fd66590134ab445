"""Hold the frozen linear layers in 4 bits while adapters train (QLoRA, arXiv 2305.14314), with bitsandbytes.

A layer is quantized if the model calls it as a module. These read weights directly and stay as they are: the short
convolution, A_log, dt_bias and D, the scan of Mamba-1 (x_proj and dt_proj), and the output embeddings. So do spliced
heads, which train in full. Fused training kernels read out_proj; `Adapters` avoids them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from surgery.errors import RecipeError, RunError, reading
from surgery.files.atomic import new_folder
from surgery.models.inserted import new_modules
from surgery.recipe import Train, TrainStage
from surgery.train.checkpoints import WEIGHTS, checkpoints
from surgery.train.shared_prefix import unshare_weights

BLOCK = 64  # weights that share a scale
BITS_PER_WEIGHT = 4 + 8 / BLOCK + 32 / (BLOCK * 256)  # a scale has 8 bits, and 256 scales share one of 32 bits
_DIRECTLY_READ = ("x_proj", "dt_proj")

Unquantized = dict[str, nn.Linear]


def quantization_of(section: Train, stage: TrainStage) -> BitsAndBytesConfig | None:
    """Return transformers' settings for `lora.quantization` of a stage; None if it is not set.

    Raises:
        RecipeError: bitsandbytes is not installed.
    """
    if stage.lora.quantization is None:
        return None
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        hint = "It needs bitsandbytes: pip install bitsandbytes. Or set it to null."
        raise RecipeError("train.lora.quantization", stage.lora.quantization, hint) from None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=stage.lora.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if section.precision == "bf16" else torch.float32,
    )


def quantizable(model: PreTrainedModel) -> Unquantized:
    """Return the linear layers that may be quantized, by name.

    Their number of inputs is a multiple of the block. bitsandbytes 0.50 dequantizes other layers wrongly on a CPU.
    """
    new = tuple(f"{name}." for name in new_modules(model))
    kept = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not kept
        and not name.startswith(new)
        and name.rpartition(".")[2] not in _DIRECTLY_READ
        and module.in_features % BLOCK == 0
    }


@contextmanager
def quantized(
    models: Sequence[PreTrainedModel], settings: BitsAndBytesConfig | None, device: torch.device
) -> Iterator[Unquantized]:
    """Quantize the linear layers of all models inside the context, and put the unquantized layers back afterwards.

    The unquantized layers stay in main memory. Layers with equal weights are quantized once, so a frozen base shares
    them with the hybrid.

    Args:
        models: changed in place. After the context they are on the device that they were on before.
        settings: from `quantization_of`. None quantizes nothing.

    Yields:
        The unquantized layers of the first model, by name. Merge adapters into these.
    """
    if settings is None:
        yield {}
        return
    originals: list[Unquantized] = []
    made: dict[int, nn.Module] = {}  # by the identity of the weight, which layers may share
    homes = [model.device for model in models]
    for model in models[1:]:
        unshare_weights(models[0], model)  # merging changes the unquantized layers of the first in place
    try:
        for model in models:
            originals.append(layers := quantizable(model))
            for name, layer in layers.items():
                twin = originals[0].get(name)
                weight = layer.weight if twin is None or not _equal(twin, layer) else twin.weight
                if id(weight) not in made:
                    made[id(weight)] = _in_4_bits(layer, settings, device)
                model.set_submodule(name, made[id(weight)])
                layer.cpu()
        yield originals[0]
    finally:
        for model, layers, home in zip(models, originals, homes, strict=False):
            for name, layer in layers.items():
                model.set_submodule(name, layer)
            model.to(home)


def resume_unquantized(model: PreTrainedModel, folder: Path, accelerator: Accelerator) -> None:
    """Write the layers that a stage will quantize into the folder of its checkpoints, or read them if it has begun.

    Checkpoints hold no quantized layers. Call it if an earlier stage has changed these.

    Raises:
        RunError: the disk is full, or the file cannot be read.
    """
    file, stored = folder / "unquantized" / WEIGHTS, dict[str, nn.Parameter]()
    for name, layer in quantizable(model).items():
        for kind, parameter in layer.named_parameters():
            if all(parameter is not other for other in stored.values()):  # layers may share a weight
                stored[f"{name}.{kind}"] = parameter
    if checkpoints(folder):
        with reading("steps", str(file), f"Delete {folder.name}, and the stages before it resume.", RunError):
            weights = load_file(file)
            for name, parameter in stored.items():
                parameter.data = weights[name].to(parameter.device)
    elif accelerator.is_main_process:
        with new_folder(file.parent) as new:
            save_file({name: p.detach().cpu().contiguous() for name, p in stored.items()}, new / WEIGHTS)
    accelerator.wait_for_everyone()


def _in_4_bits(layer: nn.Linear, settings: BitsAndBytesConfig, device: torch.device) -> nn.Linear:
    """Return a quantized copy of a layer."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    kind: dict[str, Any] = {
        "compress_statistics": settings.bnb_4bit_use_double_quant,
        "quant_type": settings.bnb_4bit_quant_type,
    }
    shape, dtype = (layer.in_features, layer.out_features), settings.bnb_4bit_compute_dtype
    result: Any = Linear4bit(*shape, bias=False, compute_dtype=dtype, device="meta", **kind)
    weight = layer.weight.detach().to(device, copy=True).contiguous()
    result.weight = Params4bit(weight, requires_grad=False, module=result, **kind)
    if layer.bias is not None:
        result.bias = nn.Parameter(layer.bias.detach().to(device, copy=True), requires_grad=False)
    # In eval mode on a CPU with AVX512-BF16, bitsandbytes rearranges the weights for a kernel of another package, and
    # fails if the number of rows is no multiple of 32.
    result.support_avx512bf16_for_cpu = False
    return result.to(device)  # quantizes


def _equal(layer: nn.Linear, other: nn.Linear) -> bool:
    pairs = [(layer.weight, other.weight), (layer.bias, other.bias)]
    return all(a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu())) for a, b in pairs)
