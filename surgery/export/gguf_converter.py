"""Run llama.cpp's convert_hf_to_gguf.py on an export, in a process of its own. llama.cpp is not changed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surgery.errors import ModelError, RecipeError
from surgery.export.pre_tokenizers import nearest_rule
from surgery.export.reload import run_script
from surgery.recipe import Export

SCRIPT = "convert_hf_to_gguf.py"
TESTED = "Tested: llama.cpp in llama-cpp-python 0.3.36."
_SECTION, _FIELD = "export.llama_cpp", "export.pre_tokenizer"
_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# The converter, with three changes in memory: the name of the pre-tokenizer is ours where it knows none, config.json is
# read as it is (transformers adds fields of experts, with which the converter writes another architecture), and the
# vocabulary is not padded, since the tensors are not.
CONVERT = """
import importlib.util, json, os, sys
script, task, *arguments = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", script)
converter = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = converter
spec.loader.exec_module(converter)
base = sys.modules.get("conversion.base", converter)
for part in ("TextModel", "ModelBase"):
    if not hasattr(base, part):
        sys.exit(f"it has no class {part}")

class Fields(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, 1 if key == "pad_vocab_size_multiple" else value)

def load_hparams(folder, *_, **__):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return Fields(json.load(file))

if task == "name":
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(arguments[0], trust_remote_code=False)
    try:
        print("name:", base.TextModel.get_vocab_base_pre(None, tokenizer))
    except NotImplementedError:
        print("name:")
else:
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: task
    base.ModelBase.load_hparams = staticmethod(load_hparams)
    sys.argv = [script, *arguments]
    converter.main()
"""


def find_converter(llama_cpp: str | None) -> Path:
    """Find the script in the folder `llama_cpp` or on the PATH. Raise RecipeError if there is none."""
    if llama_cpp is None:
        found = shutil.which(SCRIPT)
        if found is not None:
            return Path(found).resolve()
        hint = f"GGUF files are written by llama.cpp's {SCRIPT}, which is not on the PATH. Clone "
        hint += f"https://github.com/ggml-org/llama.cpp and set {_SECTION} to its folder."
        raise RecipeError(_SECTION, "not set", hint)
    path = Path(os.path.expanduser(llama_cpp))
    path = path / SCRIPT if path.is_dir() else path
    if not path.is_file():
        raise RecipeError(_SECTION, llama_cpp, f"Set it to a folder of llama.cpp that holds {SCRIPT}.")
    return path.resolve()


def pre_tokenizer_of(tokenizer: PreTrainedTokenizerBase, section: Export) -> str:
    """Return llama.cpp's name for a tokenizer's pre-tokenizer: the recipe's, the converter's, or one with equal tokens.

    Raises:
        RecipeError: the converter does not know the tokenizer, and no rule gives the same tokens.
        ModelError: the converter fails, or the tokenizer is no byte-level BPE.
    """
    converter = find_converter(section.llama_cpp)
    if section.pre_tokenizer is not None:
        return section.pre_tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        lines = _run(converter, "name", scratch).splitlines()
    name = next((line.removeprefix("name:").strip() for line in lines if line.startswith("name:")), "")
    if name:
        return name
    nearest, share, text = nearest_rule(tokenizer)
    if text:
        value = f"no rule of llama.cpp splits text as the tokenizer does: {nearest} gives the same tokens in "
        value += f"{share:.0%} of test texts, and others for {text[:40]!r}"
        raise RecipeError(_FIELD, value, f"Set it to {nearest} to accept that, or set export.format: nemotron_h.")
    return nearest


def convert(folder: Path, file: Path, pre_tokenizer: str, section: Export) -> None:
    """Write a GGUF file of a checkpoint in the format `nemotron_h`. Raises RecipeError and ModelError."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "hybrid")  # its name is stored in the file
        source.mkdir()
        for path in folder.iterdir():
            if path.name in _READ or path.name.startswith("model"):
                (source / path.name).symlink_to(path.resolve())
        arguments = [str(source), "--outfile", str(file.resolve()), "--outtype", _TYPES[section.dtype]]
        _run(find_converter(section.llama_cpp), pre_tokenizer, *arguments, "--model-name", "Mamba-2 hybrid")
    if not file.is_file():
        raise ModelError(SCRIPT, "it wrote no file", f"Use another version of llama.cpp. {TESTED}")


def _run(converter: Path, *arguments: str) -> str:
    """Run `CONVERT` and return what it prints. Raises ModelError with the last line of its errors."""
    with tempfile.TemporaryDirectory() as scratch:
        hint = f"Use another version of llama.cpp. {TESTED}"
        return run_script(CONVERT, [str(converter), *arguments], scratch, SCRIPT, hint)
