"""Load pretrained checkpoints from folders and the Hub, with checks before and after.

transformers fills a missing tensor with random numbers and prints a table; here it is an error. Pickles may hold
tensors only, and remote code runs only with `base.trust_remote_code`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer

import surgery.hybrid  # noqa: F401  (registers the hybrid classes)
from surgery.errors import ModelError, naming, reading
from surgery.files.atomic import digest
from surgery.files.ownership import kind_of
from surgery.files.shipped import close_models, local_path
from surgery.models import mamba_ssm_format, tensor_files
from surgery.models.config_checks import (
    CONFIG_HINT,
    check_kernels,
    check_layers,
    check_patterns,
    check_sizes,
    check_splice_version,
    published_limits,
    quantization_of,
)
from surgery.models.inserted import as_inserted, has_inserted
from surgery.models.lookup import find_family, unknown_type
from surgery.models.sizes import meta_model
from surgery.models.stored import SLOW_TOKENIZER, TOKENIZER, StoredModel, names_in, without_config
from surgery.models.tensor_faults import agreed_tensors, check_quantization, refuse_faults, refuse_not_finite
from surgery.models.tensor_files import WEIGHTS
from surgery.models.torch_scans import choose_by_device
from surgery.recipe import Base
from surgery.recipe.public import is_hub_id, source_of
from surgery.recipe.yaml import read_mapping
from surgery.registry import load_plugins

T = TypeVar("T")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def _loader(load: Callable[[Base], T]) -> Callable[[Base | str | Path], T]:
    """Decorator of a loader. It takes a folder or Hub id too, and names `base.field` in errors."""

    @wraps(load)
    def loader(base: Base | str | Path) -> T:
        if not isinstance(base, Base):
            base = Base(model=str(base))
        if base.field == "base.model":
            return load(base)
        with naming(base.field, "base.model"), naming(base.field, "base.tokenizer"):
            return load(base)

    return loader


@_loader
def open_checkpoint(base: Base) -> StoredModel:
    """Load and check the config of a checkpoint, without its weights.

    Raises:
        ModelError: the folder or repository does not exist; the config is missing or damaged; or the model type or
            format is unknown.
    """
    load_plugins()  # installed packages may register families
    model, revision = source_of(base.model, base.revision)
    hint = CONFIG_HINT
    if is_hub_id(model):
        hint = "No such folder, and no such model on the Hub (or the Hub cannot be reached)."
        hint += f"{_meant(model)} Check the name."
    with reading("base.model", f"{base.model}, config.json", hint):
        if not is_hub_id(model) and not Path(model).is_dir():
            there = "It is a file." if Path(model).is_file() else f"There is no such folder.{_meant(model)}"
            raise ModelError("base.model", model, f"{there} Use a checkpoint folder, or a Hub id.")
        if not is_hub_id(model) and base.revision is not None:
            raise ModelError("base.revision", base.revision, f"{model} is a folder, which has none. Remove it.")
        data, revision = _config_of(model, revision)
        check_sizes(data)
        check_splice_version(data)
        check_patterns(data)
        if not base.trust_remote_code:
            check_kernels(data)
        packed = data.get("quantization_config")
        if packed is not None and not AutoHfQuantizer.supports_quant_method(packed):
            hint = "transformers does not support this method. Use a checkpoint with another one."
            raise ModelError("config.json: quant_method", packed["quant_method"], hint)
        is_mamba_ssm = mamba_ssm_format.is_mamba_ssm(data)
        if is_mamba_ssm:
            config = mamba_ssm_format.convert_config(data)
        else:
            if data.get("model_type", "mamba2") not in CONFIG_MAPPING and not base.trust_remote_code:
                raise unknown_type(data["model_type"])
            config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=base.trust_remote_code)
        stored = StoredModel(model, revision, _with_channels(config, base), is_mamba_ssm)
        if (family := find_family(config.model_type)) is not None:
            check_layers(data, config)
            if not family.is_hybrid(config) and not has_inserted(config):  # whose configs say what the class reads
                stored.change(published_limits(config, family.lower_limit))
            family.mixers(config)
    stored.refuse_adapter()
    if packed is not None and stored.has_local_weights:
        check_quantization(stored, stored.tensors())
    return stored


def _config_of(model: str, revision: str | None) -> tuple[dict[str, Any], str | None]:
    """Read config.json as transformers does, and find the commit of a repository on the Hub."""
    if is_hub_id(model):
        try:
            file = Path(hf_hub_download(model, "config.json", revision=revision))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # the Hub cannot be reached
                raise
            raise without_config(model, revision) from None
        # In the Hub's cache, the folder of a file is named after its commit.
        commit = re.search(r"/snapshots/([0-9a-f]{40})/", file.as_posix())
        revision = commit[1] if commit else revision
    elif not (file := Path(model) / "config.json").is_file():
        raise without_config(model)
    with reading("base.model", str(file), "It is damaged. Download it again."):
        tensor_files.read_json(file, "base.model")
    return PreTrainedConfig.get_config_dict(model, revision=revision)[0], revision


def _meant(model: str) -> str:
    """Return a question with a checkpoint of a similar name, beside a missing one or shipped, or nothing."""
    parent = Path(model).parent
    beside = [path.parent.name for path in parent.glob("*/config.json")]
    close = get_close_matches(Path(model).name, beside, 1, cutoff=0.75)
    meant = [(parent / close[0]).as_posix()] if close else close_models(model)
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def _with_channels(config: PreTrainedConfig, base: Base) -> PreTrainedConfig:
    """Write `base.channels_per_head`, the width of Mamba-1's heads, into the config."""
    if base.channels_per_head is None:
        return config
    family, inner = find_family(config.model_type), 0
    if family is not None and family.groups_channels and not family.is_hybrid(config):
        inner = config.intermediate_size
    if not inner or inner % base.channels_per_head:
        hint = "Only a Mamba-1 without a splice takes it. Remove the key."  # heads of a hybrid are those of its splice
        if inner:
            hint = f"Use a divisor of the {inner} channels."
        raise ModelError("base.channels_per_head", base.channels_per_head, hint)
    config.channels_per_head = base.channels_per_head
    return config


@_loader
def load_config(base: Base) -> PreTrainedConfig:
    """Load the config of a checkpoint. Raises ModelError as `open_checkpoint`."""
    return open_checkpoint(base).config


@_loader
def load_model(base: Base) -> PreTrainedModel:
    """Load a model in eval mode on the CPU, in `base.dtype`.

    Args:
        base: the recipe's section `base`; or a folder or Hub id, which is loaded in fp32.

    Raises:
        ModelError: as `open_checkpoint`; files are damaged; tensors are missing, unexpected or misshapen (lists their
            names); or the installed transformers computes this model wrongly.
    """
    stored = open_checkpoint(base)
    if stored.config.is_encoder_decoder:
        hint = "It is an encoder-decoder model. Use a decoder-only model."
        raise ModelError("config.json: is_encoder_decoder", stored.config.is_encoder_decoder, hint)
    dtype = "auto" if base.dtype == "auto" else getattr(torch, base.dtype)
    options = {"config": stored.config, "dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    hint, method = CONFIG_HINT, quantization_of(stored.config)
    if method:
        hint = f"transformers cannot load weights quantized with {method} here. Use the unquantized checkpoint."
    with reading("base.model", base.model, hint):
        meta = meta_model(stored.config, base.trust_remote_code)
        tensors = agreed_tensors(stored, meta)
        _refuse_larger(stored, meta)
        if stored.is_mamba_ssm or stored.is_loose or any(name != tensor.name for name, tensor in tensors.items()):
            state = dict(zip(tensors, tensor_files.read_tensors(tensors.values()), strict=True))
            # Not `key_mapping`: transformers would undo the renaming when the model is saved.
            model, info = type(meta).from_pretrained(None, state_dict=state, **options)
            if stored.find("generation_config.json") is not None:
                model.generation_config = GenerationConfig.from_pretrained(stored.model, revision=stored.revision)
            model.name_or_path = model.config.name_or_path = base.model
        else:
            options |= {"revision": stored.revision, "trust_remote_code": base.trust_remote_code}
            model, info = AutoModelForCausalLM.from_pretrained(stored.model, **options)
            if local_path(base.model) != base.model:  # name it as the recipe does, not by the place of the installation
                model.name_or_path = model.config.name_or_path = base.model
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    misshapen = {name: tuple(shape) for name, shape, _ in info["mismatched_keys"]}
    refuse_faults(base.model, expected, info["missing_keys"], info["unexpected_keys"], misshapen)
    refuse_not_finite(base.model, model.named_parameters())
    choose_by_device(model)
    with reading("base.model", base.model, f"The forward pass failed. {CONFIG_HINT}"), torch.no_grad():
        model.eval()(torch.zeros(1, 3, dtype=torch.long, device=model.device))
    return as_inserted(model)


def _refuse_larger(stored: StoredModel, model: PreTrainedModel) -> None:
    """Raise ModelError, before memory is allocated, if the config describes a much larger model than the files hold."""
    size = sum(file.stat().st_size for file in stored.weight_files())
    count = sum(parameter.numel() for parameter in model.parameters())
    bits = 1 if quantization_of(stored.config) else 8  # minimum size of a parameter
    if count * bits > size * 8:
        value = f"{stored.model}: {count:,} parameters in config.json, but only {size:,} bytes of weights"
        raise ModelError("base.model", value, CONFIG_HINT)


@_loader
def check_finite(base: Base) -> None:
    """Check the weight files of a model, one tensor at a time, before it is loaded.

    Raises:
        ModelError: as `open_checkpoint`; or a weight is NaN or infinite.
    """
    stored = open_checkpoint(base).tensors()
    refuse_not_finite(base.model, zip(stored, tensor_files.read_tensors(stored.values(), 2**30), strict=True))


def has_tokenizer(base: Base) -> bool:
    """Whether the folder of the tokenizer has files of one. True for every id on the Hub."""
    folder = Path(local_path(base.tokenizer or base.model))
    return not folder.is_dir() or bool(names_in(folder, ("*token*", *SLOW_TOKENIZER)))


def _of_run(base: Base) -> Base:
    """Name the tokenizer for a model in the folder of a run, which has none: that of the run's export, or its base."""
    run = Path(local_path(base.model)).parent
    if base.tokenizer is not None or has_tokenizer(base) or kind_of(run) != "run":
        return base
    with reading(f"{run / 'recipe.yaml'}", None, "Set the tokenizer instead."):
        given = read_mapping(run / "recipe.yaml")["base"]
        of_base = given["tokenizer"] or "@".join(filter(None, (given["model"], given["revision"])))
    return base.model_copy(update={"tokenizer": str(run / "export") if (run / "export").is_dir() else of_base})


@_loader
def load_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """Load the tokenizer from `base.tokenizer`, or from the model.

    For a model in the folder of a run, such as `runs/NAME/trained`, it is the run's. A tokenizer without a padding
    token gets its end token as one, or else another special token.

    Raises:
        ModelError: there is no tokenizer, or it is not a fast one (probes need character offsets).
    """
    base = _of_run(base)
    source = base.tokenizer or base.model
    with naming("base.tokenizer" if base.tokenizer else "base.model", "base.model"):
        name, revision = source_of(source, None if base.tokenizer else base.revision)
    hint = "There is no tokenizer. Set base.tokenizer to the folder or Hub id of one."
    if base.field != "base.model":
        how = f"AutoTokenizer.from_pretrained(NAME).save_pretrained({source!r})"
        hint = f"The folder has no tokenizer. Save the one that the model was trained with into it: {how}."
    none = ModelError("base.tokenizer", source, hint)
    if not is_hub_id(name) and not Path(name).is_dir():
        hint = "It is a file. Use its folder." if Path(name).is_file() else "There is no such folder. Set another."
        raise ModelError("base.tokenizer" if base.tokenizer else "base.model", source, hint)
    if not has_tokenizer(base):
        raise none
    if (Path(name) / "config.json").is_file():  # which AutoTokenizer reads too
        if base.tokenizer is None:
            open_checkpoint(base)
        with reading("base.tokenizer", f"{source}, config.json", CONFIG_HINT):
            check_sizes(tensor_files.read_json(Path(name) / "config.json", "base.tokenizer"))
    for file in _tokenizer_files(Path(name)):
        tensor_files.check_small(file, "base.tokenizer")
        if file.suffix == ".json" and file.name != "tokenizer.json":
            _check_keys(file)
    hint = "Its tokenizer files are damaged. Download them again."
    if is_hub_id(name):
        hint = "There is no such folder, and no such tokenizer on the Hub, or the Hub cannot be reached."
    with reading("base.tokenizer", source, hint):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=base.trust_remote_code)
        is_empty = not tokenizer("a 7", add_special_tokens=False)["input_ids"]
    if is_empty:
        raise none
    if not tokenizer.is_fast:
        hint = "It is not a fast tokenizer, and probes need character offsets. Use one with a tokenizer.json."
        raise ModelError("base.tokenizer", source, hint)
    if tokenizer.pad_token_id is None:  # any special token does, since padding is masked
        tokenizer.pad_token = tokenizer.eos_token or next(iter(tokenizer.all_special_tokens), None)
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, model: str = "the model") -> None:
    """Raise ModelError if the tokenizer has tokens without an embedding in the model."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        hint = "Use the tokenizer that the model was trained with (base.tokenizer in a recipe)."
        value = f"its largest token id is {largest}, but {model} has {config.vocab_size} embeddings"
        raise ModelError("base.tokenizer", value, hint)


@_loader
def revision_of(base: Base) -> str:
    """Identify the weights: by the commit of a Hub id, or by a hash of a folder's files."""
    folder = Path(local_path(base.model))
    if folder.is_dir():
        code = ("*.py",) if base.trust_remote_code else ()
        weights = (file for pattern in ("config.json", *WEIGHTS, *code) for file in folder.glob(pattern))
        revision = digest(*sorted((*_tokenizer_files(folder), *weights)))[:16]
    else:
        revision = open_checkpoint(base).revision or ""
    tokenizer = Path(local_path(base.tokenizer)) if base.tokenizer is not None else None
    if tokenizer is None or not tokenizer.is_dir():
        return revision
    return f"{revision}+{digest(*_tokenizer_files(tokenizer))[:8]}"


def _check_keys(file: Path) -> None:
    """Refuse control characters in keys: tokenizers prints unknown keys, and a terminal obeys them."""
    keys: list[str] = []
    with reading("base.tokenizer", str(file), "Its tokenizer files are damaged. Download them again."):
        json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: keys.extend(key for key, _ in pairs)
        )
    if any(_CONTROL.search(key) for key in keys):
        raise ModelError("base.tokenizer", str(file), "A key holds a control character. Download the file again.")


def _tokenizer_files(folder: Path) -> list[Path]:
    """List the files that a tokenizer is loaded from."""
    patterns = TOKENIZER if (folder / "tokenizer.json").is_file() else (*TOKENIZER, *SLOW_TOKENIZER)
    return sorted(file for pattern in patterns for file in folder.glob(pattern))
