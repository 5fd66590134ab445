"""Texts that a base writes itself, and what stands for them before it has."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from surgery.data.base_text import stand_in, write_texts
from surgery.data.generated import GeneratedStream
from surgery.data.offsets import tokenized
from surgery.data.user import open_source
from surgery.recipe import Source
from tests.support.own_data import write
from tests.support.pico import pico_base, pico_tokenizer


def test_texts_are_samples_of_the_models_own_distribution(tmp_path: Path) -> None:
    """A model that holds every token for as likely writes many different ones: nothing cuts the tail."""
    model, tokenizer = pico_base(vocab_size=1024), pico_tokenizer()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    model.generation_config.update(do_sample=False, top_k=1, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(1)
    state, seen = torch.get_rng_state(), []
    files = [tmp_path / name for name in "abc"]
    for path, seed in zip(files, (0, 0, 1), strict=True):
        write_texts(path, model, tokenizer, 9, 64, seed, lambda *done: seen.append(done))
    assert seen[:2] == [(8, 9), (9, 9)] and torch.equal(state, torch.get_rng_state())
    texts = [json.loads(line)["text"] for line in files[0].read_text().splitlines()]
    ids = {i for tokens in tokenized(tokenizer, texts) for i in tokens.ids}
    assert len(texts) == 9 and len(ids) > 200
    assert all(len(text) > 64 for text in texts)  # an end of text does not end it
    assert files[0].read_text() == files[1].read_text() != files[2].read_text()


def test_before_the_base_has_written_texts_of_as_many_tokens_stand_for_them() -> None:
    tokenizer = pico_tokenizer()
    source = Source.model_validate({"base_text": 8, "rows": 3, "max_tokens": 50, "weights": {"base_kl": 1.0}})
    documents = GeneratedStream(source, tokenizer, 0, 0).step(0)
    assert documents == [stand_in(tokenizer, 50)] * 3
    assert [len(tokens.ids) for tokens in tokenized(tokenizer, [d.text for d in documents])] == [50] * 3


def test_once_it_has_they_are_read_whole(tmp_path: Path) -> None:
    source = Source.model_validate({"base_text": 2, "rows": 2, "max_tokens": 3, "weights": {"base_kl": 1.0}})
    rows = ["one two three four five", "six seven eight nine ten"]
    texts = write(tmp_path / "texts.jsonl", [{"text": row} for row in rows])
    documents = open_source(source, pico_tokenizer(), 0, 0, texts=texts).step(0)
    assert sorted(document.text for document in documents) == rows
