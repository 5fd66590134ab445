"""Load an exported folder in a process that cannot import this library, and compare with the stored reference.

This runs the folder's modelling files: check them first, or pass a private copy. The reference is computed in fp32,
which represents every stored precision exactly. Two machines differ by fp32 rounding only, so the tolerance is small.

Shape legend: B prompts, T tokens, V vocabulary, K stored vocabulary entries, N new tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.errors import ModelError, reading
from surgery.export.files import AGAIN, read_object
from surgery.files.atomic import write_text
from surgery.files.secret_scan import SECRET_NAME
from surgery.hybrid import modeling_hybrid

# As a fraction of the logits' standard deviation. Other summation orders and fp64 differ by at most 4e-5; scaling the
# new heads' output by 1.01 differs by at least 9e-3, disabling them by 0.7. paper/VALIDATION.md has the measurements.
TOLERANCE = 1e-3
_STORED = 64  # logits per token, evenly spaced over the vocabulary
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 2, 24, 8

SAMPLE = "The value of the key 'miku' is 42.\n"  # encoded with the reloaded tokenizer

# For each dtype: logits (B,T,V), the first prompt with its greedy continuation (1,T+N), and the logits (N,V) of the new
# tokens. The tokenizer is loaded without code of its own.
RELOAD = """
import importlib, json, os, sys, types
sys.modules["surgery"] = None
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids, out, sample, chooser, *dtypes = sys.argv[1:]
ids, results = load_file(ids)["ids"], {}
settings = os.path.join(folder, "tokenizer_config.json")
if os.path.isfile(settings) and not json.load(open(settings, encoding="utf-8")).get("auto_map"):
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokens = tokenizer(sample)["input_ids"]
    except BaseException as error:  # a panic in Rust is not an Exception
        sys.exit(f"the tokenizer does not load: {type(error).__name__}: {' '.join(str(error).split())}")
    results["tokenizer"] = torch.tensor(tokens, dtype=torch.int64)
    results["chat_template"] = torch.tensor(list(json.dumps(tokenizer.chat_template).encode()), dtype=torch.uint8)
for dtype in dtypes:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=not chooser, use_safetensors=True, dtype=dtype, output_loading_info=True
    )
    if chooser:  # the folder has no code that keeps the tensors of this CPU from kernels
        sys.modules["chooser"] = types.ModuleType("chooser")
        sys.modules["chooser"].__path__ = [chooser]
        module = importlib.import_module("chooser.modeling_hybrid")
        module.kernels_by_device(*(type(part) for part in model.modules()))
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            sys.exit(f"{fault.replace('_keys', '')} tensors: {sorted(map(str, info[fault]))[:4]}")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
        text = model.generate(ids[:1], return_dict_in_generate=True, **options)
    steps = torch.cat(text.logits).float()
    results |= {f"{dtype}.logits": logits, f"{dtype}.text": text.sequences, f"{dtype}.steps": steps}
save_file(results, out)
"""


def prompt_ids(vocab_size: int) -> Tensor:
    """Random prompts (B,T), the same in every check."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (_PROMPTS, _PROMPT_TOKENS), generator=generator)


def reload(folder: Path, ids_BT: Tensor, dtypes: Sequence[str], remote_code: bool = True) -> dict[str, Tensor]:
    """Load model and tokenizer in a new process and compute logits there. This runs the folder's own code.

    The process is offline, and its environment contains no secrets.

    Args:
        folder: the export.
        ids_BT: prompts.
        dtypes: `auto` for the stored precision, or `float32`, which takes four bytes per parameter.
        remote_code: pass `trust_remote_code=True` for the model.

    Returns:
        For each dtype `DTYPE.logits` (B,T,V), `DTYPE.text` (1,T+N) and `DTYPE.steps` (N,V) in fp32. Unless the folder
        has no tokenizer or one that needs code: `tokenizer`, the token ids of `SAMPLE`, and `chat_template`, the bytes
        of the template in JSON.

    Raises:
        ModelError: model or tokenizer do not load, or tensors are missing, unexpected or misshapen.
    """
    with tempfile.TemporaryDirectory() as scratch:
        prompts, results = Path(scratch, "ids.safetensors"), Path(scratch, "results.safetensors")
        save_file({"ids": ids_BT}, prompts)
        chooser = "" if remote_code else str(Path(modeling_hybrid.__file__).parent)
        arguments = [str(folder.resolve()), str(prompts), str(results), SAMPLE, chooser, *dtypes]
        hint = "The folder does not load in stock transformers. Export again, or download it again."
        run_script(RELOAD, arguments, scratch, "reloading", hint)
        return load_file(results)


def make_reference(ids_BT: Tensor, reloaded: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Make the reference for other machines: some logits of every token, and a greedy continuation with its margins.

    From the pass `dtype` of `reload`, computed in fp32. `ids` (B,T), `vocabulary` (K,), `logits` (B,T,K), `text` (N,),
    `margins` (N,): best minus second-best logit.
    """
    logits_BTV, steps_NV = reloaded[f"{dtype}.logits"].float(), reloaded[f"{dtype}.steps"]
    V = logits_BTV.shape[-1]
    vocabulary_K = torch.arange(0, V, max(1, V // _STORED))[:_STORED]
    best_N2 = steps_NV.topk(2, dim=-1).values
    return {
        "ids": ids_BT,
        "vocabulary": vocabulary_K,
        "logits": logits_BTV[..., vocabulary_K].contiguous(),
        "text": reloaded[f"{dtype}.text"][0, ids_BT.shape[1] :].contiguous(),
        "margins": best_N2[:, 0] - best_N2[:, 1],
    }


def write_reference(file: Path, reference: Mapping[str, Tensor]) -> None:
    """Write the result of `make_reference` as JSON, with as many digits as fp32 needs."""
    lists = {
        name: (tensor.numpy().astype(str).astype(float) if tensor.is_floating_point() else tensor).tolist()
        for name, tensor in reference.items()
    }
    write_text(file, json.dumps(lists) + "\n")


def read_reference(file: Path, vocab_size: int) -> dict[str, Tensor]:
    """Load and check a reference that `make_reference` computed.

    Raises ModelError if the file is damaged, has other tensors, shapes or dtypes, or has token ids out of range.
    """
    lists = read_object(file.parent, file.name)
    with reading(file.name, None, f"The file is damaged. {AGAIN}"):
        tensors = {name: torch.tensor(numbers) for name, numbers in lists.items()}
        # Numbers without a fraction and with one have different types in JSON.
        reference = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if set(reference) != {"ids", "vocabulary", "logits", "text", "margins"}:
        raise ModelError(file.name, sorted(reference), f"These are not the tensors of a reference. {AGAIN}")
    B, T, K, N = _PROMPTS, _PROMPT_TOKENS, reference["vocabulary"].numel(), reference["text"].numel()
    shapes = {"ids": (B, T), "vocabulary": (K,), "logits": (B, T, K), "text": (N,), "margins": (N,)}
    for name, tensor in reference.items():
        is_tokens = name in ("ids", "vocabulary", "text")
        dtype = torch.int64 if is_tokens else torch.float32
        if tensor.dtype != dtype or tensor.shape != shapes[name] or not 0 < K <= _STORED or not 0 < N <= _NEW_TOKENS:
            value = f"{name} is {tuple(tensor.shape)} {tensor.dtype}"
            raise ModelError(file.name, value, f"Expected {shapes[name]} {dtype}. {AGAIN}")
        if is_tokens and not bool(((tensor >= 0) & (tensor < vocab_size)).all()):
            value = f"{name} from {tensor.min()} to {tensor.max()}"
            raise ModelError(file.name, value, f"Token ids are 0 to {vocab_size - 1}. {AGAIN}")
    return reference


def compare(reference: Mapping[str, Tensor], reloaded: Mapping[str, Tensor], dtype: str) -> tuple[float, int]:
    """Compare the result of `reload` with a reference.

    New tokens are compared up to the first one whose margin is at most twice the tolerance. Rounding may select another
    token there, and the text after it differs.

    Returns:
        The largest difference of the logits as a fraction of their standard deviation, and the number of new tokens
        that agree.

    Raises:
        ModelError: the logits differ by more than `TOLERANCE`, or a token with a larger margin differs.
    """
    logits_BTK = reloaded[f"{dtype}.logits"].float()[..., reference["vocabulary"]]
    spread = max(float(reference["logits"].std()), 1e-30)
    difference = float((logits_BTK - reference["logits"]).abs().max()) / spread
    if not difference <= TOLERANCE:
        value = f"logits differ from the stored reference by {difference:.2g} of their standard deviation"
        hint = f"Rounding stays below {TOLERANCE:g}, so weights, code or libraries differ from those of the export."
        raise ModelError("reloading", value, hint)
    new, agree = reloaded[f"{dtype}.text"][0, reference["ids"].shape[1] :].tolist(), 0
    for expected, margin in zip(reference["text"].tolist(), reference["margins"].tolist(), strict=True):
        if margin <= 2 * TOLERANCE * spread:
            break
        if new[agree : agree + 1] != [expected]:
            value = f"generated token {agree} differs from the stored reference"
            hint = "Decoding differs from that at export: check the versions in export.json."
            raise ModelError("reloading", value, hint)
        agree += 1
    return difference, agree


def run_script(code: str, arguments: Sequence[str], scratch: str, field: str, hint: str) -> str:
    """Run code in a new process that is offline and knows no secrets, in the folder `scratch`. Returns what it prints.

    Raises:
        ModelError: it fails. `field` and `hint` are of the error, whose value is the last line of the process's errors.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not SECRET_NAME.search(k)}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(scratch, "modules"))}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch)
    if done.returncode != 0:
        raise ModelError(field, (done.stderr.strip().splitlines() or ["no message"])[-1][:300], hint)
    return done.stdout


_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
