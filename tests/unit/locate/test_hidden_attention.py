"""What heads read: rows of shares by the formula, of every kind of mixer, and the scores that are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.data.encoding import EncodedBatch, encode
from surgery.locate.hidden_attention import Shares, numpy_of, observe_patterns, prompt_attention
from surgery.models.hooks import record
from surgery.models.layouts import Streams
from surgery.models.lookup import mixer_of, structure_of
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.types import HeadId, MixerSpec
from tests.support.battery import mixers
from tests.support.cases import each
from tests.support.pico import pico_base, pico_family, pico_tokenizer, prompts

LENGTH = 11


def level(count: int = 2, length: int = LENGTH) -> EncodedBatch:
    """Prompts of one length, without padding."""
    return prompts((length,) * count)


def all_heads(model: Any, ssm: bool | None = None) -> list[HeadId]:
    return [head for spec in mixers(model, ssm) for head in spec.heads]


def head_matrices(model: Any, batch: EncodedBatch, heads: Sequence[HeadId]) -> dict[HeadId, Shares]:
    """(B,T,T) by head."""
    patterns = observe_patterns(model, batch, mixers(model))
    specs = {spec.name: spec for spec in mixers(model)}
    return {head: numpy_of(patterns.shares(specs[head.mixer], [head.head])[:, 0]) for head in heads}


@torch.no_grad()
def streams_of(model: Any, spec: MixerSpec, batch: EncodedBatch) -> Streams:
    with record(model, [spec]) as trace:
        model(batch.input_ids, use_cache=False)
    return structure_of(spec).streams(mixer_of(model, spec), spec, trace.projected[spec.name])


@torch.no_grad()
def naive_shares(model: Any, spec: MixerSpec, streams: Streams, head: int) -> Tensor:
    """(B,T,T): the vector that each token adds to the head's output, its length, the row's part; no shortcuts."""
    P, weights = spec.head_dim, structure_of(spec).hidden_attention(mixer_of(model, spec), spec, streams)
    if weights.shape[1] == spec.num_heads * P:  # a matrix for each channel
        per_channel = weights[:, head * P : (head + 1) * P]
    else:
        per_channel = weights[:, head, None].expand(-1, P, -1, -1)
    added = torch.einsum("bpts,bsp->btsp", per_channel, streams.x[:, :, head])
    lengths = added.norm(dim=-1)
    return lengths / lengths.sum(-1, keepdim=True)


@each(
    ("name", "more"),
    [
        ("mamba2", {"n_groups": 1}),
        ("mamba2", {"n_groups": 2}),
        ("mamba", {}),
        ("mamba", {"channels_per_head": 1}),
        ("falcon_mamba", {"channels_per_head": 8}),
        *((name, {}) for name in ("llamba", "falcon_h1", "bamba", "zamba2", "granite", "nemotron_h", "mamba2attn")),
    ],
)
def test_an_ssm_heads_shares_are_the_lengths_of_what_tokens_add(name: str, more: dict) -> None:
    model, batch = pico_family(name, **more), level()
    for spec in mixers(model, ssm=True)[1:]:
        streams = streams_of(model, spec, batch)
        chosen = [spec.heads[0], spec.heads[-1], spec.heads[1]]  # in no order
        found = head_matrices(model, batch, chosen)
        for head in chosen:
            expected = naive_shares(model, spec, streams, head.head).numpy()
            np.testing.assert_allclose(found[head], expected, atol=2e-6)  # shares up to 1, in fp32


ATTENTION = ("llama", "qwen2", "gpt_neox", "bamba", "zamba2", "granite", "nemotron_h", "falcon_h1", "mamba2attn")


@each("name", ATTENTION)
def test_attention_weights_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against those of sdpa's queries and keys, layer by layer; two blocks of Zamba2 share one attention module."""
    model, batch, expected = pico_family(name, attn_implementation="sdpa"), level(), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noted(module: Any, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
        scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scaling
        expected.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1))
        return sdpa(module, query, key, *args, scaling=scaling, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", noted)
    with torch.no_grad():
        model(batch.input_ids, use_cache=False)
    found = head_matrices(model, batch, all_heads(model, ssm=False))
    for spec, weights in zip(mixers(model, ssm=False), expected, strict=True):
        for head in spec.heads:
            np.testing.assert_allclose(found[head], weights[:, head.head].numpy(), atol=1e-5)


@each("name", ["llama", "zamba2", "mamba2attn"])
@each("implementation", ["sdpa", "eager"])
def test_looking_changes_nothing(name: str, implementation: str) -> None:
    model, batch = pico_family(name, attn_implementation=implementation), level()
    with torch.no_grad():
        clean = model(batch.input_ids, use_cache=False).logits
        first = head_matrices(model, batch, all_heads(model))
        assert torch.equal(model(batch.input_ids, use_cache=False).logits, clean)
    assert model.config._attn_implementation == implementation
    again = head_matrices(model, batch, all_heads(model))
    assert all(np.array_equal(again[head], first[head]) for head in first)


def documents(count: int = 3) -> list[Document]:
    """Dictionaries of different lengths."""
    return [kv_document(rng_of("hidden", i), pairs=3 + i) for i in range(count)]


def test_prompt_attention_holds_the_querys_rows_and_the_asked_matrices() -> None:
    model, tokenizer, texts = pico_base(vocab_size=1024), pico_tokenizer(), documents(2)
    held = prompt_attention(model, tokenizer, texts, mixers(model)[1:], [HeadId(2, 1)])
    for document, prompt in zip(texts, held, strict=True):
        batch = encode([document], tokenizer, until_answer=True)
        found = head_matrices(model, batch, all_heads(model)[4:])
        assert list(prompt.rows) == [str(head) for head in found] and list(prompt.matrices) == ["L2H1"]
        for head, shares in found.items():
            np.testing.assert_allclose(prompt.rows[str(head)], shares[0, -1], atol=1e-7)
        np.testing.assert_allclose(prompt.matrices["L2H1"], found[HeadId(2, 1)][0], atol=1e-7)
        assert document.text.startswith("".join(prompt.tokens))
        places = (int(batch.segment_end), int(batch.answer_token), len(prompt.tokens) - 1)
        assert tuple(prompt.marks[k] for k in ("segment end", "answer token", "query")) == places
