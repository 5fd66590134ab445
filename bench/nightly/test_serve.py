"""`transformers serve` on an exported folder, asked by the OpenAI client: the texts that `generate` gives."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from surgery.export import transformers_folder
from surgery.export.folder import export_model
from surgery.models.lookup import geometry_of
from surgery.recipe import Export, Splice
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.types import HeadId, HeadSet, ScoredHead
from tests.integration.test_conformance import folder as folder
from tests.support.exports import in_this_process
from tests.support.pico import (
    pico_base,
    pico_tokenizer,
    randomise,
)
from tests.support.processes import Started, stock


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with an inserted pair of layers, as a checkpoint of transformers' own Nemotron-H."""
    base, there = pico_base(vocab_size=1024), tmp_path_factory.mktemp("stock") / "export"
    section = Splice(select="list", heads=("L1H2",), form="pair", head_dim=16)
    chosen = (ScoredHead(HeadId(1, 2), "neither", "answer_token", {}),)
    plan = make_plan(HeadSet("pico", "", geometry_of(base.config), (), chosen, "list", 0), base.config, section)
    model = randomise(splice_model(base, plan, section).requires_grad_(False), 7)
    model.get_input_embeddings().weight.mul_(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_folder, "reload", in_this_process)
        export_model(model, pico_tokenizer(), there, Export(format="nemotron_h", chat_template="plain"))
    return there


# The command `transformers`, in a process that cannot import this library.
SERVE = """
import sys
sys.modules["surgery"] = None
from transformers.cli.transformers import main
main()
"""


Server = tuple[OpenAI, Path]  # a client, and the folder that is served
PROMPTS = ("The value of", "The value of the key 'a' is", "k 1, " * 40 + "k", "b 2, " * 90)


@pytest.fixture(scope="module", params=["folder", "stock_folder"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """`transformers serve FOLDER`, with `--trust-remote-code` only where the folder holds code."""
    if not is_serve_available():
        pytest.skip("transformers' server is not installed: pip install 'transformers[serving]'")
    folder = request.getfixturevalue(request.param)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["transformers", "serve", str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--trust-remote-code"] * (request.param == "folder")
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules")}
    process = stock().start(command, folder.parent, environment, SERVE)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client, folder
    finally:
        process.kill(signal.SIGKILL)
        process.wait()


def wait_for(address: str, process: Started) -> None:
    for _ in range(400):
        assert process.running, "the server is gone"
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise AssertionError("the server does not answer")


def ask(server: Server, way: tuple[str, bool], prompt: str) -> tuple[str, int]:
    """The answer as a completion or in a chat, at once or streamed, and in how many parts it came."""
    (client, folder), (kind, streamed) = server, way
    options: dict[str, Any] = {"model": str(folder), "max_tokens": 6, "temperature": 0, "stream": streamed}
    if kind == "completion":
        answer = client.completions.create(prompt=prompt, **options)
        parts = [part.choices[0].text for part in (answer if streamed else [answer])]
    else:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
        parts = [part.choices[0].delta.content if streamed else part.choices[0].message.content
                 for part in (answer if streamed else [answer])]  # fmt: skip
    return "".join(filter(None, parts)), len(list(filter(None, parts)))


def test_a_server_answers_many_at_once(server: Server) -> None:
    """To the OpenAI client: prompts of different lengths, completions and chats, at once and streamed, sent together.
    Each gets the text that `generate` gives, since the chat template `plain` continues a single message."""
    folder = server[1]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    expected = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        expected[prompt] = tokenizer.decode(new, skip_special_tokens=True)
    assert len(set(expected.values())) > 1
    ways = [(kind, streamed) for kind in ("completion", "chat") for streamed in (False, True)]
    asked = [(way, prompt) for way in ways for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda request: ask(server, *request), asked))
    for ((_, streamed), prompt), (text, parts) in zip(asked, answers, strict=True):
        assert text == expected[prompt] and (parts > 1) == streamed
