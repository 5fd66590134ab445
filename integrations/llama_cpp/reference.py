"""Write exports in the format `gguf` and transformers' answers, for `compare.py`. Runs in the repository's environment.

    python integrations/llama_cpp/reference.py .gguf/cases --llama-cpp FOLDER

Every case is an export and `answers.json`: prompts as token ids with the greedy tokens of transformers in fp32, and
prompts as text with their token ids and transformers' greedy text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations" / "vllm" / "tests")]

from inserted import inserted_case, trained_case
from reference import BASE, FILLER, answer, random_prompts, retrieval_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version

from surgery.probes.knowledge import fact_question, facts
from surgery.probes.kv_retrieval import kv_prompts
from surgery.recipe import Export

CASES = ("block", "pair", "nemotron-pair", "experts-pair", "trained-pair")
NEMOTRON_H = {"nemotron-pair": "mlp", "experts-pair": "moe"}
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 100, 127, 200, 256, 433, 600)
NEW_TOKENS = 24
TEXTS = 20  # of each kind


def texts_of() -> list[str]:
    """Return prompts of the probes: facts, and pairs of a word and a number below 100."""
    retrieval = kv_prompts("gguf", 0, TEXTS, 8, filler=(0, 20))
    return [d.text[: d.questions[0].answer[0]] for d in (*map(fact_question, facts()[:TEXTS]), *retrieval)]


@torch.no_grad()
def write_case(case: str, folder: Path, llama_cpp: str) -> None:
    """Write the export and `answers.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    section = Export(format="gguf", llama_cpp=str(Path(llama_cpp).resolve()), pre_tokenizer="gpt-2")
    if case == "trained-pair":
        fields = section.model_dump(include={"format", "llama_cpp", "pre_tokenizer"})
        trained_case(*(f"export.{name}={value}" for name, value in fields.items()))(folder)
    else:
        inserted_case(BASE, "pair" if case in NEMOTRON_H else case, section, NEMOTRON_H.get(case))(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [answer(model, p, NEW_TOKENS) for p in random_prompts(LENGTHS, model.config.vocab_size, 0)]
    texts = []
    for text in texts_of():
        row = answer(model, tokenizer(text)["input_ids"], NEW_TOKENS)
        tokens = row["tokens"]
        if tokenizer.eos_token_id in tokens:  # the text ends there
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        texts.append({**row, "text": text, "answer": tokenizer.decode(tokens)})
    versions = {"torch": torch.__version__, "transformers": transformers_version}
    record = {"case": case, "versions": versions, "prompts": prompts, "texts": texts}
    if case in FILLER:
        rows = retrieval_prompts(folder, FILLER[case])
        record["retrieval"] = [{**answer(model, p, len(gold)), "gold": gold} for p, gold in rows]
    (folder / "answers.json").write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    """Write all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    for case in options.only:
        write_case(case, options.folder / case, options.llama_cpp)
        print(f"{case}: ready", flush=True)


if __name__ == "__main__":
    main()
