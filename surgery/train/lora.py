"""Train LoRA adapters in addition to the spliced heads, with PEFT.

Spliced heads and inserted layers train in full, and are saved with the adapters as `modules_to_save`. There are three
special cases:

- The fused training kernels of Mamba read `out_proj.weight` directly. They bypass an adapter and cannot read 4 bits. A
  mixer whose `out_proj` has an adapter or 4 bits uses the code path of eval mode, which calls the module.
- PEFT refuses `out_proj` for the model types with these kernels. With the other code path this is not necessary, so the
  model type is hidden from PEFT.
- The columns of `out_proj` of a silenced head are zero and get no gradient, and the hybrid silences the adapter's input
  there. Merging an adapter would fill these columns, so they are set to zero again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from surgery.errors import RecipeError
from surgery.files.atomic import new_folder
from surgery.models.alterations import silence
from surgery.models.inserted import new_modules
from surgery.models.lookup import family_of, mixer_of
from surgery.recipe import Lora
from surgery.types import Graft


class Adapters:
    """Adapters on the target layers of a model, outside its spliced heads. Untrained adapters do not change the output.

    Args:
        model: changed in place.
        grafts: the spliced heads. SSM heads that they replace stay silent after merging.

    Raises:
        RecipeError: a target matches no linear layer, or its weight is that of the input embeddings.
    """

    def __init__(self, model: PreTrainedModel, section: Lora, grafts: Sequence[Graft] = ()) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # slow to import, and few runs use it
        from peft.tuners.lora import LoraLayer

        self.model, self.section = model, section
        self._silent = [graft for graft in grafts if graft.unit == "head" and graft.mode == "replace"]
        self._hooks: list[RemovableHandle] = []
        self._config = LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=adapter_targets(model, section),
        )
        model.config.model_type = ""  # by which PEFT refuses `out_proj` of some models
        model.is_loaded_in_4bit = True  # without it, PEFT treats layers of 4 bits as plain ones
        try:
            inject_adapter_in_model(self._config, model)
        finally:
            del model.config.model_type  # restores the class attribute
            del model.is_loaded_in_4bit
        for spec in family_of(model.config).mixers(model.config):
            mixer = mixer_of(model, spec)
            out_proj = getattr(mixer, "out_proj", None)
            if isinstance(out_proj, LoraLayer) or (out_proj is not None and not out_proj.weight.is_floating_point()):
                self._hooks += _unfuse(mixer)

    def check_gradients(self) -> None:
        """Raise RecipeError if an adapter has no gradient after a backward pass, because a kernel bypassed it."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name and parameter.grad is None:
                hint = "A kernel reads this layer's weight, so the adapter gets no gradient. Remove this target."
                raise RecipeError("train.lora.targets", name.split(".lora_")[0], hint)

    def save(self, folder: Path, base: str) -> None:
        """Write adapters and spliced heads for `PeftModel.from_pretrained(spliced_model, folder)`, atomically.

        `base` is the path or id of the spliced model.
        """
        new_heads = list(new_modules(self.model))
        inside = tuple(f"{name}." for name in new_heads)
        state = {
            f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous()
            for name, tensor in self.model.state_dict().items()
            if ".lora_" in name or name.startswith(inside)
        }
        config = copy.copy(self._config)
        config.modules_to_save = new_heads or None
        config.base_model_name_or_path, config.inference_mode = base, True
        with new_folder(folder) as new:
            save_file(state, new / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(new))

    @torch.no_grad()
    def merge(self, unquantized: Mapping[str, nn.Linear]) -> None:
        """Add every adapter to its layer's weight, or to that of the unquantized layer, and remove it."""
        from peft.tuners.lora import LoraLayer

        for name, module in list(self.model.named_modules()):
            if isinstance(module, LoraLayer):
                layer = unquantized.get(name)
                if layer is None:
                    module.merge()
                    layer = module.get_base_layer()
                else:
                    delta: Tensor = module.get_delta_weight("default").to(layer.weight.device)  # type: ignore[attr-defined]
                    layer.weight.copy_(layer.weight.to(delta.dtype) + delta)
                self.model.set_submodule(name, layer)
        for hook in self._hooks:
            hook.remove()
        for graft in self._silent:
            silence(mixer_of(self.model, graft.site).out_proj, graft)


def adapter_targets(model: PreTrainedModel, section: Lora) -> list[str]:
    """Return the full names of the layers that get an adapter, none of them inside a spliced head.

    Raises:
        RecipeError: a target matches no linear layer, or its weight is that of the input embeddings.
    """
    new = tuple(f"{name}." for name in new_modules(model))
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.startswith(new)]
    matches = {target: [n for n in linear if n.rsplit(".", 1)[-1] == target] for target in section.targets}
    for target, names in matches.items():
        if not names:
            known = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in linear}))
            raise RecipeError("train.lora.targets", target, f"No linear layer has that name. Use one of {known}.")
        embeddings = model.get_input_embeddings().weight
        if any(model.get_submodule(name).weight is embeddings for name in names):
            hint = "It shares its weight with the input embeddings, and merging would change both. Remove this target."
            raise RecipeError("train.lora.targets", target, hint)
    return [name for names in matches.values() for name in names]


def refused_by_peft(model: PreTrainedModel, section: Lora) -> list[str]:
    """Return the targets whose adapters `PeftModel.from_pretrained` refuses for this type of model."""
    types = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
    return [name for name in section.targets if name == "out_proj" and model.config.model_type in types]


def _unfuse(mixer: nn.Module) -> list[RemovableHandle]:
    """Put the mixer into eval mode during its forward pass, but not the modules below it."""
    modes: list[bool] = []

    def enter(module: nn.Module, args: Any) -> None:
        modes.append(module.training)
        module.training = False

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module.training = modes.pop()

    return [mixer.register_forward_pre_hook(enter), mixer.register_forward_hook(leave, always_call=True)]


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of all adapters, each once."""
    return [p for name, p in model.named_parameters() if ".lora_" in name]
