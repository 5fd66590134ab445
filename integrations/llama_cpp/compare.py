"""Compare llama.cpp's greedy answers with transformers' (`reference.py`). Runs in an environment with llama-cpp-python.

    python integrations/llama_cpp/compare.py .gguf/cases --results FILE

Tokens have to be equal and log-probabilities within 1e-3 for every prompt in fp32, and within 2e-2 in modes that round
to 16 bits. If a token differs whose margin to the second choice is below twice that in the reference, the prompt is not
compared any further.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

WHOLE, FP32 = {"n_batch": 1024, "n_ubatch": 1024}, {"type_k": 0, "type_v": 0}  # 0 is GGML_TYPE_F32
# Options of each mode, and the tolerance.
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "whole prompts": ({**WHOLE, **FP32}, 1e-3),
    "chunked prefill": ({"n_batch": 16, "n_ubatch": 16, **FP32}, 1e-3),
    "flash attention": ({**WHOLE, **FP32, "flash_attn": True}, 2e-2),
    "16-bit cache": (WHOLE, 2e-2),  # the default
}


def log_probability(llm: llama_cpp.Llama, token: int) -> tuple[int, float]:
    """Return the best token, and the log-probability of `token`, behind the last one that was evaluated."""
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits = np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).astype(np.float64)
    return int(logits.argmax()), float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def run_prompts(llm: llama_cpp.Llama, rows: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """Generate greedily behind every prompt."""
    equal, ties, largest, right, start = 0, 0, 0.0, 0, time.process_time()
    for row in rows:
        llm.reset()
        llm.eval(row["prompt"])
        tokens, agrees = [], True
        for expected, value, margin in zip(row["tokens"], row["logprobs"], row["margins"], strict=True):
            token, logprob = log_probability(llm, expected)
            if agrees:
                largest = max(largest, abs(logprob - value))
                agrees = token == expected
                ties += not agrees and margin < 2 * tolerance
            tokens.append(token)
            llm.eval([token])
        equal += agrees
        right += tokens == row.get("gold")
    count = sum(len(r["prompt"]) + len(r["tokens"]) for r in rows)
    seconds = time.process_time() - start
    result = {"prompts": len(rows), "equal": equal, "ties": ties, "largest_logprob_difference": largest}
    result["passed"] = equal + ties == len(rows) and largest <= tolerance
    if "gold" in rows[0]:
        result["accuracy_transformers"] = sum(r["tokens"] == r["gold"] for r in rows) / len(rows)
        result["accuracy_llama_cpp"] = right / len(rows)
    return {**result, "cpu_seconds": round(seconds, 2), "tokens_per_cpu_second": round(count / seconds)}


def lost_margin(llm: llama_cpp.Llama, row: dict[str, Any], text: str) -> float:
    """Return the margin of the first token of the reference that a text does not have; infinite if it has all."""
    for count, margin in enumerate(row["margins"], start=1):
        if not text.startswith(llm.detokenize(row["tokens"][:count]).decode(errors="ignore")):
            return margin
    return float("inf")


def run_texts(llm: llama_cpp.Llama, rows: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """Compare token ids of texts, and the text that follows them."""
    same_ids = [llm.tokenize(r["text"].encode(), add_bos=True, special=False) == r["prompt"] for r in rows]
    equal, ties = 0, 0
    for row in rows:
        done = llm.create_completion(row["text"], max_tokens=len(row["tokens"]), temperature=0)
        text = done["choices"][0]["text"]
        expected = row["answer"].replace("\ufffd", "")
        # llama-cpp-python drops bytes that are no UTF-8, and adds tokens where it waits for the rest of a character.
        longer = "\ufffd" in row["answer"] and expected != "" and text.startswith(expected)
        same = text == expected or longer
        equal += same
        ties += not same and lost_margin(llm, row, text) < 2 * tolerance
    result = {"texts": len(rows), "equal_token_ids": sum(same_ids), "equal_texts": equal, "ties": ties}
    return {**result, "passed": all(same_ids) and equal + ties == len(rows)}


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    names = ("llama-cpp-python", "numpy")
    return {"date": date.today().isoformat(), "python": platform.python_version(), **{n: version(n) for n in names}}


def main() -> None:
    """Compare all cases in all modes; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    results, reference_versions = [], {}
    for path in sorted(options.folder.glob("*/answers.json")):
        reference = json.loads(path.read_text(encoding="utf-8"))
        reference_versions = reference["versions"]
        for mode, (settings, tolerance) in MODES.items():
            model = str(path.parent / "model.gguf")
            llm = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, **settings)
            names = {"case": reference["case"], "mode": mode}
            results.append({**names, "set": "lengths", **run_prompts(llm, reference["prompts"], tolerance)})
            results.append({**names, "set": "texts", **run_texts(llm, reference["texts"], tolerance)})
            if "retrieval" in reference:
                results.append({**names, "set": "retrieval", **run_prompts(llm, reference["retrieval"], tolerance)})
            for result in results[-3 if "retrieval" in reference else -2 :]:
                print(json.dumps(result), flush=True)
            llm.close()
    record = {"versions": versions(), "reference": reference_versions, "results": results}
    options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [", ".join(r[k] for k in ("case", "mode", "set")) for r in results if not r["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} as expected" + "".join(f"\nnot: {name}" for name in failed))
    sys.exit(1 if failed or not results else 0)


if __name__ == "__main__":
    main()
