"""Write hybrids, prompts and transformers' answers to them, for `compare.py`. Runs in the repository's environment.

    python integrations/vllm/tests/reference.py .serve/cases [--only NAME ...]

Every case is a folder with a checkpoint and `answers.json`: prompts as token ids, and for each the greedy tokens of
transformers in fp32 with their log-probabilities and the margins to the second choice. The set `lengths` also has the
log-probabilities of all tokens of prompt and answer, in fp32 and in bf16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from inserted import inserted_case, trained_case
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

import surgery.hybrid
from surgery.hybrid import (
    FalconMambaHybridConfig,
    GraniteHybridConfig,
    Mamba2HybridConfig,
    Mamba2HybridForCausalLM,
    MambaHybridConfig,
    NemotronHHybridConfig,
    Zamba2HybridConfig,
)
from surgery.probes.kv_retrieval import kv_prompts
from tests.support.pico import randomise

EXPORT, BASE = ROOT / "checkpoints/quickstart/export", ROOT / "checkpoints/pico-far"
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 100, 127, 200, 256, 433, 600)
NEW_TOKENS = 24
GROWING = tuple(range(236, 252))  # 16 prompts that need a second block of 256 tokens while they generate
GROWING_130M = tuple(range(492, 508))  # with the blocks of 512 tokens that vLLM takes at this shape
SHARED, ENDS = (300, 520, 600, 700), (1, 2, 5, 30, 257)  # tokens of prompts with the same beginnings
PAIRS, RETRIEVALS = 32, 100
FILLER = {"quickstart": (0, 20), "trained-pair": None}  # words between key and value, of cases that can retrieve

SMALL = {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 32, "chunk_size": 16, "n_groups": 1}
SMALL |= {"num_hidden_layers": 4, "vocab_size": 973, "tie_word_embeddings": True}
REAL = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "chunk_size": 256, "n_groups": 1}
REAL |= {"num_hidden_layers": 24, "vocab_size": 50288, "tie_word_embeddings": True}


def site(layer: int, heads: Sequence[int], shape: dict[str, Any], mode: str = "add", **fields: Any) -> dict[str, Any]:
    """Return an entry of `config.splice` for copies of heads of a model."""
    copied = {"qk_width": shape["state_size"], "v_width": shape["head_dim"], "head_dim": shape["head_dim"]}
    branch = {"init": "ssm", "activation": "silu", "gate": True, "bias": False, "conv_kernel": 4, "conv_bias": True}
    place = {"layer": layer, "heads": list(heads), "mode": mode, "reads": ["segment_end"] * len(heads), "unit": "head"}
    return {**place, **copied, **branch, "norm_eps": 1e-5, **fields}


def random_model(shape: dict[str, Any], splice: list[dict[str, Any]] | None) -> Any:
    """Return a model whose every weight is random, so that no part of it can be left out without a difference."""
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    if splice is None:
        return randomise(Mamba2ForCausalLM(Mamba2Config(**shape, **tokens)), 0).eval()
    return randomise(Mamba2HybridForCausalLM(Mamba2HybridConfig(**shape, **tokens, splice=splice)), 0).eval()


def family_case(config: Any, splice: list[dict[str, Any]], **fields: Any) -> Callable[[Path], None]:
    """Return a function that writes a random hybrid of another family."""

    def write(folder: Path) -> None:
        causal = next(classes[2] for classes in surgery.hybrid.CLASSES if classes[0] is config)
        tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "vocab_size": 973, "hidden_size": 128}
        model = randomise(causal(config(**tokens, **fields, splice=splice)), 0)
        with torch.no_grad():  # or the next token is the last one, whatever the mixers do
            model.get_input_embeddings().weight.mul_(0.1)
        model.eval().save_pretrained(folder)

    return write


def random_case(shape: dict[str, Any], splice: list[dict[str, Any]] | None) -> Callable[[Path], None]:
    """Return a function that writes a random model."""
    return lambda folder: random_model(shape, splice).save_pretrained(folder)


def copy_of(source: Path) -> Callable[[Path], None]:
    """Return a function that copies a checkpoint as it is."""
    return lambda folder: shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.html", "figures", "*.png"))


UNEQUAL = [
    site(0, [3], SMALL, "replace"),
    site(1, [0, 5, 6], SMALL, qk_width=48, copied_width=32),
    site(3, [7], SMALL, init="random", qk_width=40, activation=None, gate=False),
]
INNER = {"state_size": 32, "head_dim": 32}  # of the other families' SSM layers: 8 heads
THREE_SITES = [
    site(0, [3, 5], INNER, "replace"),
    site(2, [0], INNER, qk_width=48, copied_width=32),
    site(3, [7], INNER, init="random", qk_width=32, activation=None, gate=False),
]
STREAMS = {"conv_kernel": 0, "rank": 8, "qk_width": 16, "copied_width": 16}  # copied heads of Mamba-1
MAMBA1 = {"num_hidden_layers": 4, "state_size": 16, "channels_per_head": 32, "time_step_rank": 8}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_chunk_size": 16}
SSM, FULL = "linear_attention", "full_attention"


def stream_sites(eps: float | None) -> list[dict[str, Any]]:
    """Return sites of Mamba-1. The last has a convolution."""
    return [
        site(0, [3, 5], INNER, "replace", stream_eps=eps, **STREAMS),
        site(1, [6], INNER, stream_eps=eps, **STREAMS | {"qk_width": 24}),
        site(3, [7], INNER, init="random", qk_width=32, activation=None, gate=False, rank=8, stream_eps=eps),
    ]


CASES: dict[str, Callable[[Path], None]] = {
    "quickstart": copy_of(EXPORT),
    "quickstart-base": copy_of(BASE),
    "replace": random_case(SMALL, [site(2, [4], SMALL, "replace")]),
    "two-layers": random_case(SMALL, [site(1, [0, 5], SMALL), site(3, [2, 7], SMALL)]),
    "unequal-layers": random_case(SMALL | {"n_groups": 2, "conv_kernel": 3}, UNEQUAL),
    "mamba1": family_case(MambaHybridConfig, stream_sites(None), **MAMBA1),
    "falcon-mamba": family_case(FalconMambaHybridConfig, stream_sites(1e-6), **MAMBA1),
    "nemotron-h": family_case(
        NemotronHHybridConfig,
        [{**entry, "layer": layer} for entry, layer in zip(THREE_SITES, (0, 3, 5), strict=True)],
        **ATTENTION,
        layers_block_type=[SSM, "mlp", FULL, SSM, "mlp", SSM],
        **{"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 16},
        **{"intermediate_size": 192, "head_dim": 32, "time_step_min": 1e-30},
    ),
    "granite": family_case(
        GraniteHybridConfig,
        THREE_SITES,
        **ATTENTION | BAMBA,
        num_hidden_layers=4,
        layer_types=[SSM, FULL, SSM, SSM],
        **{"shared_intermediate_size": 192, "num_local_experts": 4, "intermediate_size": 64},
        **{"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 1.5},
        **{"attention_multiplier": 0.2, "position_embedding_type": "rope"},
    ),
    "zamba2": family_case(
        Zamba2HybridConfig,
        # As narrow as the shared transformer's heads: in vLLM, branches then have the shape of its cache.
        [
            {**entry, "layer": layer, "qk_width": 32, "copied_width": 32}
            for entry, layer in zip(THREE_SITES, (0, 2, 5), strict=True)
        ],
        num_hidden_layers=6,
        layers_block_type=[SSM, "hybrid", SSM, "hybrid", "hybrid", SSM],
        **{"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 32, "chunk_size": 16, "num_mem_blocks": 2},
        **{"use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 16, "time_step_min": 1e-30},
        **ATTENTION | {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 192},
    ),
    "130m": random_case(REAL, [site(6, [3, 11], REAL), site(12, [20], REAL, "replace")]),
    "130m-base": random_case(REAL, None),
    "block": inserted_case(BASE, "block"),
    "pair": inserted_case(BASE, "pair"),
    "nemotron-pair": inserted_case(BASE, "pair", nemotron_h="mlp"),
    "trained-pair": trained_case(),
}


def random_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=rng).tolist() for length in lengths]


def retrieval_prompts(folder: Path, filler: tuple[int, int] | None) -> list[tuple[list[int], list[int]]]:
    """Return prompts with 32 pairs, and the tokens of their answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for document in kv_prompts("serve", 0, RETRIEVALS, PAIRS, filler=filler):
        start, end = document.questions[0].answer
        prompt, whole = (tokenizer(document.text[:stop])["input_ids"] for stop in (start, end))
        rows.append((prompt, whole[len(prompt) :]))
    return rows


@torch.no_grad()
def answer(model: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Generate greedily, one prompt at a time without padding."""
    tokens, logprobs, margins, cache = [], [], [], {}
    ids = torch.tensor([prompt])
    for _ in range(new_tokens):
        output = model(ids, **cache, use_cache=True, logits_to_keep=1)
        cache = {"cache": output.cache}
        best = output.logits[0, -1].double().log_softmax(-1).topk(2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = best.indices[None, :1]
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "margins": margins}


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of every token but the first."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def write_case(name: str, folder: Path) -> None:
    """Write the checkpoint and `answers.json` of a case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    CASES[name](folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    sets = {"lengths": [answer(model, p, NEW_TOKENS) for p in random_prompts(LENGTHS, vocab, 0)]}
    if not name.startswith("130m"):
        rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for row in sets["lengths"]:
            ids = row["prompt"] + row["tokens"]
            row["text"] = {dtype: logprobs(m, ids) for dtype, m in (("fp32", model), ("bf16", rounded))}
    if name != "130m-base":
        lengths = GROWING_130M if name == "130m" else GROWING
        sets["growing"] = [answer(model, p, NEW_TOKENS) for p in random_prompts(lengths, vocab, 1)]
        beginnings, ends = random_prompts(SHARED, vocab, 2), random_prompts(ENDS, vocab, 3)
        sets["shared"] = [answer(model, b + end, NEW_TOKENS) for b in beginnings for end in ends]
    if name in FILLER:
        rows = retrieval_prompts(folder, FILLER[name])
        sets["retrieval"] = [{**answer(model, p, len(gold)), "gold": gold} for p, gold in rows]
    versions = {"torch": torch.__version__, "transformers": sys.modules["transformers"].__version__}
    text = json.dumps({"case": name, "versions": versions, "sets": sets})
    (folder / "answers.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write all cases, or those of `--only`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(CASES))
    options, _ = parser.parse_known_args()  # `make serve-test` passes the options of compare.py too
    for name in [name for name in CASES if name in options.only]:
        write_case(name, options.folder / name)
        print(f"{name}: ready", flush=True)


if __name__ == "__main__":
    main()
