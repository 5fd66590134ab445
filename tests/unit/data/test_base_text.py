"""Texts that a base writes itself, and what stands for them before it has."""

from __future__ import annotations

import torch

from surgery.data.base_text import stand_in, write_texts
from surgery.data.generated import GeneratedStream
from surgery.data.offsets import tokenized
from surgery.recipe import Source
from tests.support.pico import pico_base, pico_tokenizer


def test_texts_are_samples_of_the_models_own_distribution() -> None:
    """A model that holds every token for as likely writes many different ones: nothing cuts the tail."""
    model, tokenizer = pico_base(vocab_size=1024), pico_tokenizer()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    model.generation_config.update(do_sample=False, top_k=1, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(1)
    state, seen = torch.get_rng_state(), []
    texts = write_texts(model, tokenizer, 3, 64, 0, 2, lambda *done: seen.append(done))
    assert len(texts) == 3 and seen == [(2, 3), (3, 3)] and torch.equal(state, torch.get_rng_state())
    ids = {i for tokens in tokenized(tokenizer, texts) for i in tokens.ids}
    assert len(ids) > 80
    assert all(len(text) > 64 for text in texts)  # an end of text does not end it
    assert texts == write_texts(model, tokenizer, 3, 64, 0, 2, lambda *done: None)
    assert texts != write_texts(model, tokenizer, 3, 64, 1, 2, lambda *done: None)


def test_before_the_base_has_written_texts_of_as_many_tokens_stand_for_them() -> None:
    tokenizer = pico_tokenizer()
    source = Source.model_validate({"base_text": 8, "rows": 3, "max_tokens": 50, "weights": {"base_kl": 1.0}})
    documents = GeneratedStream(source, tokenizer, 0, 0).step(0)
    assert documents == [stand_in(tokenizer, 50)] * 3
    assert [len(tokens.ids) for tokens in tokenized(tokenizer, [d.text for d in documents])] == [50] * 3
