"""A checkpoint whose config is loaded and whose weights are not, and what else a folder of weights can be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedConfig

from surgery.errors import ModelError, reading
from surgery.models import mamba_ssm_format, tensor_files

# Patterns of the files of a tokenizer. Without tokenizer.json, a fast one is made from those of a slow one.
TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
SLOW_TOKENIZER = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
_MERGE = "AutoPeftModelForCausalLM.from_pretrained({where!r}).merge_and_unload().save_pretrained(FOLDER)"
_DCP = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {where} {where}/pytorch_model.bin"
_TENSORS = "Write its tensors by name to pytorch_model.bin (torch.save), and config.json beside them."
_OLD = "In transformers 4: AutoModelForCausalLM.from_pretrained({where!r}, from_%s=True), then save_pretrained."
# What is not a checkpoint of transformers: files that only this format has, its name, and what to do. First match.
FOREIGN: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("adapter_config.json",), "a PEFT adapter", f"Merge it: {_MERGE}. Or use its base."),
    (("zero_to_fp32.py",), "a checkpoint of DeepSpeed", "Join it: python {where}/zero_to_fp32.py {where} {where}"),
    (("*mp_rank_*_model_states.pt",), "a checkpoint of DeepSpeed", "Join it with DeepSpeed's zero_to_fp32.py."),
    (("pytorch_model_fsdp_0/*",), "sharded by Accelerate",
     "Join it: accelerate merge-weights {where}/pytorch_model_fsdp_0 {where}"),
    (("latest_checkpointed_iteration.txt", "*mp_rank_*/model_optim_rng.pt"), "a checkpoint of Megatron",
     "Convert it with Megatron's tools/checkpoint/convert.py."),
    (("*.nemo", "model_weights/*", "context/model.yaml"), "a model of NeMo",
     "Export it with NeMo: llm.export_ckpt(..., target='hf')."),
    (("*.distcp",), "a checkpoint of torch.distributed", f"Join it: {_DCP}"),
    (("params.json", "consolidated*"), "in Mistral's or Meta's own layout",
     "Use the model in transformers' layout (config.json), often named -hf."),
    (("*.gguf", "*.onnx", "openvino_model.xml", "*.engine", "*.mlpackage/*", "*.npz"),
     "a conversion for another runtime", "Use the checkpoint that it was made from."),
    (("model_index.json",), "a pipeline of Diffusers", "Use a language model."),
    (("flax_model*",), "a checkpoint of Flax", _OLD % "flax"),
    (("tf_model*",), "a checkpoint of TensorFlow", _OLD % "tf"),
    (("*.ckpt.index", "*_CHECKPOINT_METADATA", "*.msgpack"), "a checkpoint of TensorFlow or JAX", _TENSORS),
    (("*.ckpt",), "a checkpoint of Lightning", f"Its tensors are under 'state_dict'. {_TENSORS}"),
    (("*.pth", "*.pt"), "a file of torch", _TENSORS),
)  # fmt: skip


def foreign(names: Iterable[str], where: str) -> str:
    """Say what a folder is that holds no checkpoint of transformers, and what to do. Empty if nothing is known.

    Args:
        names: paths of files, relative to the folder.
        where: the folder, or the id of a repository.
    """
    names = list(names)
    models = [name.removesuffix("/config.json") for name in names if name.endswith("/config.json")]
    steps = {int(match[1]): name for name in models if (match := re.fullmatch(r"(?:.*-)?(\d+)", name))}
    if models:
        what = f"the newest of {len(steps)} checkpoints" if len(steps) > 1 else "a model"
        return f"{what.capitalize()} is in {where}/{steps[max(steps)] if steps else models[-1]}. Use it."
    for patterns, what, remedy in FOREIGN:
        if any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return f"It is {what}. {remedy.format(where=where)}"
    return ""


def names_in(folder: Path, patterns: Iterable[str] = ("*", "*/*", "*/*/*")) -> list[str]:
    """List files of a folder, by default to a depth of three, at most 5000."""
    paths = chain.from_iterable(folder.glob(pattern) for pattern in patterns)
    return sorted(path.relative_to(folder).as_posix() for path in islice(paths, 5000))


def without_config(model: str, revision: str | None = None) -> ModelError:
    """Return the error for a folder or repository without a config.json, which says what it is instead."""
    if Path(model).is_dir():
        names = names_in(Path(model))
        files = [name for name in names if "/" not in name][:5]
    else:
        names = files = HfApi().list_repo_files(model, revision=revision)[:5000]
    hint = foreign(names, model)
    base = ""
    if "adapter_config.json" in names and (Path(model) / "adapter_config.json").is_file():
        with reading("base.model", f"{model}, adapter_config.json", "It is damaged. Download it again."):
            named = tensor_files.read_json(Path(model) / "adapter_config.json", "base.model")
            base = f" Its base is {named['base_model_name_or_path']}." if "base_model_name_or_path" in named else ""
    hint = f"{hint}{base}" if hint else f"The folder has no config.json. It has {', '.join(files[:5]) or 'no files'}."
    return ModelError("base.model", model, hint)


@dataclass(frozen=True)
class StoredModel:
    """A pretrained model whose config is loaded and whose weights are not.

    Attributes:
        model: a folder, or the id of a repository on the Hub.
        revision: commit on the Hub; ignored for a folder.
        config: config of transformers, converted if the files are in mamba_ssm's format.
        is_mamba_ssm: whether the files are in mamba_ssm's format.
        changes: fields of `config` that differ from config.json, as the weights or the published model demand.
    """

    model: str
    revision: str | None
    config: PreTrainedConfig
    is_mamba_ssm: bool
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """The folder; None for a model on the Hub."""
        return Path(self.model) if Path(self.model).is_dir() else None

    def change(self, fields: Mapping[str, Any]) -> None:
        """Set fields of the config, and note them for a copy of config.json."""
        self.changes.update(fields)
        for name, value in fields.items():
            setattr(self.config, name, value)

    def find(self, name: str) -> Path | None:
        """Return the local path of a file, which is downloaded if necessary. None if there is no such file."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.model, name, revision=self.revision))
        except EntryNotFoundError:
            return None

    def files(self, patterns: Sequence[str]) -> list[Path]:
        """Return the local paths of all files that match a pattern. They are downloaded if necessary."""
        folder = self.folder
        if folder is None:
            folder = Path(snapshot_download(self.model, revision=self.revision, allow_patterns=list(patterns)))
        return [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]

    def refuse_adapter(self) -> None:
        """Raise ModelError for an adapter in the model's folder, which transformers would apply."""
        if self.find("adapter_config.json") is not None:
            hint = "transformers would apply the adapter silently. Merge it (`merge_and_unload`), or remove the file."
            raise ModelError("base.model", f"{self.model} holds adapter_config.json", hint)

    @property
    def has_local_weights(self) -> bool:
        """Whether the model is a folder that holds files with names of weights."""
        return self.folder is not None and bool(names_in(self.folder, (*tensor_files.WEIGHTS, "*.index.json")))

    @property
    def is_loose(self) -> bool:
        """Whether transformers does not find the weight files by their names."""
        return not tensor_files.weight_files(self.find)

    def weight_files(self) -> tuple[Path, ...]:
        """Return the weight files. Raises ModelError if there is none."""
        files = tensor_files.weight_files(self.find)
        if not files and self.folder is not None:
            files = tensor_files.loose_files(self.folder)
        if not files:
            known = foreign(names_in(self.folder), self.model) if self.folder is not None else ""
            hint = "It has no weights (*.safetensors or pytorch_model.bin). Use a complete checkpoint."
            if self.folder is None:
                hint = f"The Hub cannot be reached, or {hint[0].lower()}{hint[1:]}"
            raise ModelError("base.model", self.model, known or hint)
        return files

    def tensors(self) -> dict[str, tensor_files.Stored]:
        """List the tensors of the weight files by transformers' names. Raises ModelError as `inventory`."""
        stored = tensor_files.inventory(self.weight_files())
        if not self.is_mamba_ssm:
            return stored
        return {mamba_ssm_format.to_transformers(n): s for n, s in stored.items() if not mamba_ssm_format.is_derived(n)}
