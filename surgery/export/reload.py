"""Loads an exported folder as a stranger would, in a process that cannot import this library. Owns: that process, and
the reference that travels with an export, by which another machine tells whether it computes the same model.

Must never know: what a folder has to hold, how it was written. It runs the folder's modelling files: whoever calls it
has to trust them.

The reference is computed in fp32 whatever the weights are stored in, since fp32 holds them exactly: so what is left
between two machines is rounding in fp32, and the tolerance can be small.

Shape legend: B prompts, T tokens, V vocabulary, K kept entries of it, N new tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.errors import ModelError
from surgery.files.secret_scan import SECRET_NAME

# Of the standard deviation of the kept logits. Other orders of summation, and fp64, were at most 4e-5 of it away; 1%
# more of the new heads' output was 9e-3 away at least, new heads off 0.7. docs/CONFORMANCE.md has the numbers.
TOLERANCE = 1e-3
_KEPT = 64  # logits a token, evenly spaced over the vocabulary
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 2, 24, 8

# What a stranger's machine would do. For each dtype asked for: logits (B,T,V), the prompt and its greedy continuation
# (1,T+N), and the logits (N,V) that it was chosen by.
RELOAD = """
import sys
sys.modules["surgery"] = None
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, ids, out, *dtypes = sys.argv[1:]
ids, found = load_file(ids)["ids"], {}
for dtype in dtypes:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, use_safetensors=True, dtype=dtype, output_loading_info=True
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            sys.exit(f"{fault.replace('_keys', '')} tensors: {sorted(map(str, info[fault]))[:4]}")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
        text = model.generate(ids[:1], return_dict_in_generate=True, **options)
    steps = torch.cat(text.logits).float()
    found |= {f"{dtype}.logits": logits, f"{dtype}.text": text.sequences, f"{dtype}.steps": steps}
save_file(found, out)
"""


def prompt_ids(vocab_size: int) -> Tensor:
    """The prompts (B,T) of every check: random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (_PROMPTS, _PROMPT_TOKENS), generator=generator)


def reload(folder: Path, ids_BT: Tensor, dtypes: Sequence[str]) -> dict[str, Tensor]:
    """Loads the folder in a clean process, once for each dtype, and computes there. It runs the folder's own code.

    Args:
        dtypes: `auto` for what is stored, or `float32`, which takes four bytes a parameter.

    Returns:
        `DTYPE.logits` (B,T,V), `DTYPE.text` (1,T+N) and `DTYPE.steps` (N,V) in fp32.

    Raises:
        ModelError: it does not load, or tensors are missing, left over or misshapen.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch, "ids.safetensors"), Path(scratch, "found.safetensors")
        save_file({"ids": ids_BT}, given)
        command = [sys.executable, "-c", RELOAD, str(folder.resolve()), str(given), str(found), *dtypes]
        extra = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(scratch, "modules"))}
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(extra), cwd=scratch)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError("reloading", last[:300], "The folder does not load in stock transformers.")
        return load_file(found)


def make_reference(ids_BT: Tensor, found: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """What another machine compares with: a few logits of every token, and a greedy continuation with its margins.

    Args:
        found: of `reload`; `dtype` names the pass that computed in fp32.

    Returns:
        `ids` (B,T), `vocabulary` (K,), `logits` (B,T,K), `text` (N,), `margins` (N,): best minus second-best logit.
    """
    logits_BTV, steps_NV = found[f"{dtype}.logits"].float(), found[f"{dtype}.steps"]
    V = logits_BTV.shape[-1]
    vocabulary_K = torch.arange(0, V, max(1, V // _KEPT))[:_KEPT]
    best_N2 = steps_NV.topk(2, dim=-1).values
    return {
        "ids": ids_BT,
        "vocabulary": vocabulary_K,
        "logits": logits_BTV[..., vocabulary_K].contiguous(),
        "text": found[f"{dtype}.text"][0, ids_BT.shape[1] :].contiguous(),
        "margins": best_N2[:, 0] - best_N2[:, 1],
    }


def read_reference(file: Path, vocab_size: int) -> dict[str, Tensor]:
    """Of `make_reference`, from a file.

    Raises:
        ModelError: it is broken, or holds something else: other tensors, shapes or dtypes, tokens out of range.
    """
    again = "Download it again, or export again."
    try:
        reference = load_file(file)
    except SafetensorError as error:
        raise ModelError(file.name, str(error), f"It is broken. {again}") from None
    if set(reference) != {"ids", "vocabulary", "logits", "text", "margins"}:
        raise ModelError(file.name, sorted(reference), f"It is no reference. {again}")
    B, T, K, N = _PROMPTS, _PROMPT_TOKENS, reference["vocabulary"].numel(), reference["text"].numel()
    shapes = {"ids": (B, T), "vocabulary": (K,), "logits": (B, T, K), "text": (N,), "margins": (N,)}
    for name, tensor in reference.items():
        is_tokens = name in ("ids", "vocabulary", "text")
        dtype = torch.int64 if is_tokens else torch.float32
        if tensor.dtype != dtype or tensor.shape != shapes[name] or not 0 < K <= _KEPT or not 0 < N <= _NEW_TOKENS:
            value = f"{name} is {tuple(tensor.shape)} {tensor.dtype}"
            raise ModelError(file.name, value, f"It should be {shapes[name]} {dtype}. {again}")
        if is_tokens and not bool(((tensor >= 0) & (tensor < vocab_size)).all()):
            value = f"{name} from {tensor.min()} to {tensor.max()}"
            raise ModelError(file.name, value, f"Tokens are 0 to {vocab_size - 1}. {again}")
    return reference


def compare(reference: Mapping[str, Tensor], found: Mapping[str, Tensor], dtype: str) -> tuple[float, int]:
    """The largest difference of the logits, as a part of their standard deviation, and how many new tokens agree.

    Tokens are compared up to the first one whose margin is within twice the tolerance: rounding may choose otherwise
    there, and what follows is another text.

    Raises:
        ModelError: the logits are further apart than `TOLERANCE`, or a token differs in spite of its margin.
    """
    logits_BTK = found[f"{dtype}.logits"].float()[..., reference["vocabulary"]]
    spread = max(float(reference["logits"].std()), 1e-30)
    difference = float((logits_BTK - reference["logits"]).abs().max()) / spread
    if not difference <= TOLERANCE:
        value = f"logits differ from reference.safetensors by {difference:.2g} of their standard deviation"
        hint = f"It is another model, or another one is computed here; rounding is below {TOLERANCE:g}."
        raise ModelError("reloading", value, hint)
    new, agree = found[f"{dtype}.text"][0, reference["ids"].shape[1] :].tolist(), 0
    for expected, margin in zip(reference["text"].tolist(), reference["margins"].tolist(), strict=True):
        if margin <= 2 * TOLERANCE * spread:
            break
        if new[agree : agree + 1] != [expected]:
            value = f"generated token {agree} is not the one in reference.safetensors"
            raise ModelError("reloading", value, "Decoding computes another model here than where it was exported.")
        agree += 1
    return difference, agree


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without secrets and launchers, and `extra`."""
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not SECRET_NAME.search(k)}
    return {**kept, **extra}


_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
