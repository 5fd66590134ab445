"""LoRA beside the spliced heads, through PEFT. Owns: where adapters go, their merging, the folder that PEFT loads.

Must never know: data, losses, schedules. The spliced heads are trained whole, and stand in the saved adapter as
`modules_to_save`. Three traps are met here:

- The fused training kernels of Mamba read `out_proj.weight` themselves and pass an adapter by. A mixer whose `out_proj`
  has one runs its other path, as it does in eval mode with gradients.
- PEFT refuses `out_proj` of the model types whose kernels do that, by name, whatever path runs. With the other path the
  refusal has no reason, so it is not asked.
- A silenced head's columns of `out_proj` are zero and get no gradient, and the hybrid silences the input of an adapter
  there. Merging would fill the columns: they are zeroed again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from surgery.errors import RecipeError
from surgery.files.atomic import new_folder
from surgery.hybrid.attention import SplicedAttention
from surgery.interventions.silence import silence
from surgery.models.lookup import family_of, mixer_of
from surgery.recipe import Lora
from surgery.types import Graft


class Adapters:
    """Adapters on the target layers of a model, outside its spliced heads. They change nothing until they are trained.

    Args:
        grafts: what was spliced, for the heads that have to stay silent.

    Raises:
        RecipeError: a target matches no linear layer.
    """

    def __init__(self, model: PreTrainedModel, section: Lora, grafts: Sequence[Graft] = ()) -> None:
        self.model, self.section = model, section
        self._silent = [graft for graft in grafts if graft.unit == "head" and graft.mode == "replace"]
        self._hooks: list[RemovableHandle] = []
        self._config = _config(model, section)
        with _nameless(model):
            inject_adapter_in_model(self._config, model)
        for spec in family_of(model.config).mixers(model.config):
            mixer = mixer_of(model, spec)
            if isinstance(getattr(mixer, "out_proj", None), LoraLayer):
                self._hooks += _unfuse(mixer)

    def check_reached(self) -> None:
        """Raises RecipeError where an adapter has no gradient after a backward pass: a kernel passed it by."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name and parameter.grad is None:
                hint = "No gradient reaches this adapter: a kernel reads the layer's weight itself. Leave it out."
                raise RecipeError("train.lora.targets", name.split(".lora_")[0], hint)

    def save(self, folder: Path, base: str) -> None:
        """Writes what `PeftModel.from_pretrained(spliced model, folder)` loads: adapters, and the spliced heads whole.

        The folder is replaced in one piece.

        Args:
            base: where the model that they belong to is, for `adapter_config.json`.
        """
        branches = tuple(f"{name}." for name, m in self.model.named_modules() if isinstance(m, SplicedAttention))
        state = {
            f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous()
            for name, tensor in self.model.state_dict().items()
            if ".lora_" in name or name.startswith(branches)
        }
        config = copy.copy(self._config)
        config.modules_to_save = ["attention"] if branches else None
        config.base_model_name_or_path, config.inference_mode = base, True
        with new_folder(folder) as new:
            save_file(state, new / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(new))

    @torch.no_grad()
    def merge(self) -> None:
        """Adds every adapter to its layer's weight and takes it away; silenced heads stay silent."""
        for name, module in list(self.model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                parent, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(parent), last, module.get_base_layer())
        for hook in self._hooks:
            hook.remove()
        for graft in self._silent:
            silence(mixer_of(self.model, graft.site).out_proj, graft)


def _config(model: PreTrainedModel, section: Lora) -> LoraConfig:
    """Every target by its whole name, so that nothing inside a spliced head is meant."""
    inside = {name for name, m in model.named_modules() if isinstance(m, SplicedAttention)}
    linear = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and not any(name.startswith(f"{branch}.") for branch in inside)
    ]
    found = {target: [n for n in linear if n.rsplit(".", 1)[-1] == target] for target in section.targets}
    for target, names in found.items():
        if not names:
            there = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in linear}))
            raise RecipeError("train.lora.targets", target, f"No linear layer has that name; there are {there}.")
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=[name for names in found.values() for name in names],
    )


@contextlib.contextmanager
def _nameless(model: PreTrainedModel) -> Iterator[None]:
    """PEFT's refusal goes by the config's `model_type`."""
    model.config.model_type = ""
    try:
        yield
    finally:
        del model.config.model_type  # the class's own shows again


def _unfuse(mixer: nn.Module) -> list[RemovableHandle]:
    """While its forward runs, the mixer is in eval mode; the flags of the modules below it stay."""
    was: list[bool] = []

    def enter(module: nn.Module, args: Any) -> None:
        was.append(module.training)
        module.training = False

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module.training = was.pop()

    return [mixer.register_forward_pre_hook(enter), mixer.register_forward_hook(leave, always_call=True)]


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Of all adapters, each once."""
    return [p for name, p in model.named_parameters() if ".lora_" in name]
