"""Ask servers with the OpenAI client, and compare their greedy answers with transformers'.

    python integrations/client/compare.py .serve/client --results FILE [--only SERVER ...] [--vllm PYTHON]

Two exports are served in fp32: `hybrid`, the quickstart's with one spliced head, and `pair`, its base with inserted
layers, as transformers' own Nemotron-H. A server gets all prompts at the same time: completions and
chats, complete and streamed. Runs in the repository's environment; vLLM runs in its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery.hybrid  # noqa: F401  (registers the hybrid classes)
from surgery.export.folder import export_model
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import geometry_of
from surgery.probes.kv_retrieval import kv_prompts
from surgery.recipe import Base, Export, Splice
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.types import HeadId, HeadSet, ScoredHead

NEW_TOKENS, TIE = 16, 2e-3
PAIRS = (2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40)  # of one prompt each, in addition to SENTENCES
SENTENCES = ("The", "In the spring the", "In the spring the wolf went down to the market. The wolf", "One morning a")
RETRIEVALS = 50  # prompts with 32 pairs
KINDS = ("completion", "chat", "conversation")
CASES = ("hybrid", "pair")


def write_hybrid(folder: Path) -> None:
    """Export the quickstart's hybrid again, with a chat template."""
    base = Base(model=str(ROOT / "checkpoints/quickstart/export"))
    export_model(load_model(base), load_tokenizer(base), folder, Export(chat_template="plain"))


def write_pair(folder: Path) -> None:
    """Export a base with an inserted pair of layers. Their output weights are random, so neither is without effect."""
    base = Base(model=str(ROOT / "checkpoints/pico-far"))
    model = load_model(base)
    chosen = (ScoredHead(HeadId(3, 2), "neither", "answer_token", {}),)
    heads = HeadSet("pico-far", "", geometry_of(model.config), (), chosen, "list", 0)
    section = Splice(select="list", heads=("L3H2",), form="pair", before=1, head_dim=64)
    hybrid = splice_model(model, make_plan(heads, model.config, section), section).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for layer, name in ((1, "out_proj"), (2, "o_proj")):
        getattr(hybrid.model.layers[layer].mixer, name).weight.normal_(0, 0.05, generator=random)
    export_model(hybrid, load_tokenizer(base), folder, Export(format="nemotron_h", chat_template="plain"))


WRITE: dict[str, Callable[[Path], None]] = {"hybrid": write_hybrid, "pair": write_pair}


def messages_of(kind: str, prompt: str) -> list[dict[str, str]]:
    """Return the messages of a chat: the prompt alone, or at the end of a conversation."""
    last = {"role": "user", "content": prompt}
    if kind == "chat":
        return [last]
    before = [("system", "Answer."), ("user", "The wolf went to the"), ("assistant", " market.")]
    return [*({"role": role, "content": text} for role, text in before), last]


@torch.no_grad()
def reference(folder: Path, prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return transformers' greedy answer to every request, and the smallest margin between its two best tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = {}
    for kind in KINDS:
        for prompt in prompts:
            if kind == "completion":
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            else:
                chat = messages_of(kind, prompt)
                ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
            best = torch.cat(out.logits).log_softmax(-1).topk(2).values
            text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
            answers[f"{kind}: {prompt}"] = {"text": text, "margin": float((best[:, 0] - best[:, 1]).min()),
                                            "tokens": ids.shape[1]}  # fmt: skip
    return answers


@contextmanager
def served(server: str, case: str, folder: Path, vllm: Path) -> Iterator[tuple[OpenAI, str]]:
    """Start a server, and yield a client and the name of its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if server == "transformers":  # as the command `transformers`, which cannot import this library here
        script = "import sys; sys.modules['surgery'] = None; from transformers.cli.transformers import main; main()"
        command = [sys.executable, "-c", script, "serve", str(folder), "--device", "cpu", *place]
        command += ["--trust-remote-code"] * (case == "hybrid")
        environment["HF_MODULES_CACHE"] = str(folder.parent / "modules")
    else:
        command = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *place]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"]
        command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(512 * 2**20)]
        command += ["--no-enable-prefix-caching"]  # docs/serve.md
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        if case == "pair":
            environment["VLLM_PLUGINS"] = ""  # none: it is vLLM's own model
    log = folder.parent / f"{server}-{case}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder.parent, stdout=output, stderr=output)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600) as client:
                yield client, str(folder)
        finally:
            process.terminate()
            process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers. Exits with its log if it stops."""
    for _ in range(1200):
        if process.poll() is not None:
            sys.exit(f"{log.name}: the server stopped\n" + "\n".join(log.read_text().splitlines()[-20:]))
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"{log.name}: no answer after ten minutes")


def ask(client: OpenAI, model: str, kind: str, prompt: str, streamed: bool) -> str:
    """Return the answer to one request."""
    options: dict[str, Any] = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": streamed}
    if kind == "completion":
        answer = client.completions.create(prompt=prompt, **options)
        return "".join(part.choices[0].text for part in (answer if streamed else [answer]))
    answer = client.chat.completions.create(messages=messages_of(kind, prompt), **options)
    if streamed:
        return "".join(part.choices[0].delta.content or "" for part in answer)
    return answer.choices[0].message.content


def compared(texts: Sequence[str], expected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count equal answers. Another text is a tie if two tokens of the reference were closer than `TIE`."""
    equal = sum(text == e["text"] for text, e in zip(texts, expected, strict=True))
    ties = sum(text != e["text"] and e["margin"] < TIE for text, e in zip(texts, expected, strict=True))
    tokens = [e["tokens"] for e in expected]
    result = {"requests": len(texts), "tokens": [min(tokens), max(tokens)], "equal": equal, "ties": ties}
    other = [{**e, "answer": text} for text, e in zip(texts, expected, strict=True) if text != e["text"]]
    return {**result, **({"different": other} if other else {}), "passed": equal + ties == len(texts)}


def run(server: str, case: str, folder: Path, vllm: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Compare one server on one export."""
    answers = json.loads((folder.parent / f"{case}.json").read_text(encoding="utf-8"))
    rows = []

    def add(kind: str, streamed: bool | str, **result: Any) -> None:
        rows.append({"server": server, "export": case, "kind": kind, "streamed": streamed, **result})
        print(json.dumps(rows[-1]), flush=True)

    with served(server, case, folder, vllm) as (client, model), ThreadPoolExecutor(16) as pool:
        for kind in KINDS:
            for streamed in (False, True):
                texts = list(pool.map(lambda p: ask(client, model, kind, p, streamed), prompts))  # noqa: B023
                add(kind, streamed, **compared(texts, [answers[f"{kind}: {prompt}"] for prompt in prompts]))
        if server == "vllm":  # `transformers serve` takes one prompt for each request
            given: dict[str, Any] = {"model": model, "prompt": list(prompts), "max_tokens": NEW_TOKENS}
            choices = client.completions.create(**given, temperature=0).choices
            texts = [choice.text for choice in sorted(choices, key=lambda choice: choice.index)]
            expected = [answers[f"completion: {prompt}"] for prompt in prompts]
            add("completions in one request", False, **compared(texts, expected))
        if case == "hybrid":
            documents = list(kv_prompts("serve", 0, RETRIEVALS, 32, filler=(0, 20)))
            spans = [(document.text, *document.questions[0].answer) for document in documents]
            texts = list(pool.map(lambda s: ask(client, model, "chat", s[0][: s[1]], False), spans))
            right = sum(
                text.strip().startswith(s[0][s[1] : s[2]].strip()) for text, s in zip(texts, spans, strict=True)
            )
            add("chat, 32 pairs", False, requests=len(spans), right=right, passed=right >= 0.85 * len(spans))
    return rows


def prepare(work: Path) -> list[str]:
    """Write the exports and transformers' answers. Returns the prompts."""
    documents = [next(iter(kv_prompts("client", 0, 1, pairs, filler=(0, 20)))) for pairs in PAIRS]
    prompts = [*SENTENCES, *(document.text[: document.questions[0].answer[0]] for document in documents)]
    for case in CASES:
        if not (work / case / "export.json").is_file():
            shutil.rmtree(work / case, ignore_errors=True)
            WRITE[case](work / case)
        answers = reference(work / case, prompts)
        (work / f"{case}.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")
        different = len({answer["text"] for answer in answers.values()})
        print(f"{case}: {different} different answers", flush=True)
    return prompts


def versions(vllm: Path, servers: Sequence[str]) -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {"date": date.today().isoformat(), "python": sys.version.split()[0]}
    found |= {name: version(name) for name in ("openai", "transformers", "torch")}
    if "vllm" in servers:
        script = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('transformers'), v('torch'))"
        done = subprocess.run([str(vllm), "-c", script], capture_output=True, text=True, check=True)
        found |= dict(zip(("vllm-cpu", "vllm: transformers", "vllm: torch"), done.stdout.split(), strict=True))
    return found


def main() -> None:
    """Compare all servers; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".serve/env/bin/python", help="Python that has vLLM")
    parser.add_argument("--only", nargs="+", choices=("transformers", "vllm"), default=["transformers", "vllm"])
    options = parser.parse_args()
    work = options.folder.resolve()
    work.mkdir(parents=True, exist_ok=True)
    prompts, vllm = prepare(work), Path(os.path.abspath(options.vllm))
    results = [
        row for server in options.only for case in CASES for row in run(server, case, work / case, vllm, prompts)
    ]
    record = {"versions": versions(vllm, options.only), "results": results}
    options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [row for row in results if not row["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} as expected")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
