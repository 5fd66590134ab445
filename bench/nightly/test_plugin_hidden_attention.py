"""What heads read: rows of shares by the formula, of every kind of mixer, and the scores that are made from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.plugins.hidden_attention import (
    aggregate_score,
    entropy,
    gather_score,
    segment_spans,
    sharpness,
    structural_scores,
)
from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import PlanError
from surgery.models.hooks import record
from surgery.models.layouts import Streams
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.types import HeadId, MixerSpec
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer

SPLICE = [pico_site(0, [3, 1]), pico_site(2, [2])]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The tokenizer is made once, in no test's time."""
    pico_tokenizer()


def mixers(model: Any, ssm: bool | None = None) -> list[MixerSpec]:
    return [s for s in family_of(model.config).mixers(model.config) if ssm is None or s.is_ssm == ssm]


def all_heads(model: Any, ssm: bool | None = None) -> list[HeadId]:
    return [head for spec in mixers(model, ssm) for head in spec.heads]


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


class TestBranch:
    spliced = (HeadId(0, 3), HeadId(0, 1), HeadId(2, 2))

    def test_scores_are_those_of_the_splices_own_rows(self) -> None:
        model, tokenizer, (document,) = pico_hybrid(SPLICE, vocab_size=1024), pico_tokenizer(), documents(1)
        found = structural_scores(model, tokenizer, [document], mixers(model), branch=True)
        ids = encode([document], tokenizer, until_answer=True).input_ids
        segments, gold = segment_spans(document, tokenizer), document.questions[0].gold
        with torch.no_grad():
            asked = model(ids, use_cache=False, splice_queries=torch.full((1, 1), ids.shape[1] - 1)).splice_attentions
        for head, place in zip(self.spliced, (0, 1, 0), strict=True):
            row = asked[head.layer // 2][0, place, 0].double().numpy()
            for column, value in (("entropy", entropy(row)), ("aggregate_score", aggregate_score(row, segments, gold))):
                assert found[head][column] == pytest.approx(float(value), abs=1e-5), column

    def test_a_model_without_a_splice_is_refused(self) -> None:
        model = pico_base(vocab_size=1024)
        with pytest.raises(PlanError, match="no spliced heads"):
            structural_scores(model, pico_tokenizer(), documents(1), mixers(model), branch=True)


def documents(count: int = 3) -> list[Document]:
    """Dictionaries of different lengths."""
    return [kv_document(rng_of("hidden", i), pairs=3 + i) for i in range(count)]


class TestSegments:
    def test_are_the_lines_as_encode_counts_them(self) -> None:
        tokenizer = pico_tokenizer()
        for document in documents():
            spans, batch = segment_spans(document, tokenizer), encode([document], tokenizer)
            gold = spans[document.questions[0].gold]
            assert gold == (int(batch.segment_start), int(batch.segment_end) + 1)
            ids = batch.input_ids[0].tolist()
            lines = [tokenizer.decode(ids[start:stop]) for start, stop in spans]
            assert lines == [f"{line}\n" for line in document.text.split("\n")[1 : 1 + len(spans)]]
            assert len(spans) == len(document.questions[0].choices)


class TestScores:
    model = staticmethod(lambda: pico_base(vocab_size=1024, n_groups=2))

    def test_are_those_of_the_matrices(self) -> None:
        """The decay alone is here the matrix of a model whose B and C are constant."""
        model, tokenizer, (document,) = self.model(), pico_tokenizer(), documents(1)
        spec, batch = mixers(model)[1], encode([document], tokenizer, until_answer=True)
        segments, gold = segment_spans(document, tokenizer), document.questions[0].gold
        found = structural_scores(model, tokenizer, [document], [spec])
        streams = streams_of(model, spec, batch)
        even = replace(streams, key=torch.ones_like(streams.key), query=torch.ones_like(streams.query))
        ends = [stop - 1 for _, stop in segments]
        for head in spec.heads:
            own, constant = (naive_shares(model, spec, s, head.head)[0].double().numpy() for s in (streams, even))
            expected = {
                "gather_score": gather_score(own[ends], constant[ends], segments),
                "aggregate_score": aggregate_score(own[-1], segments, gold),
                "entropy": entropy(own[-1]),
                "sharpness": sharpness(own[-1]),
            }
            for column, value in expected.items():
                assert found[head][column] == pytest.approx(float(value), abs=1e-5), column

    def test_a_head_that_only_decays_gathers_nothing(self) -> None:
        """Its B and C are the same at every token."""
        model = pico_base(vocab_size=1024)
        mixer, N = model.backbone.layers[1].mixer, 8
        with torch.no_grad():
            mixer.conv1d.weight[-2 * N :] = 0
            mixer.conv1d.bias[-2 * N :] = 1
        found = structural_scores(model, pico_tokenizer(), documents(2), [mixers(model)[1]])
        for columns in found.values():
            np.testing.assert_allclose(columns["gather_score"], 0, atol=1e-5)

    @pytest.mark.parametrize("name", ["mamba", "zamba2", "llama"])
    def test_of_other_mixers(self, name: str) -> None:
        model = pico_family(name, vocab_size=1024)
        found = structural_scores(model, pico_tokenizer(), documents(1), mixers(model))
        assert list(found) == all_heads(model)
        for columns in found.values():
            assert 0 < columns["entropy"][0] < 1 and columns["effective_tokens"][0] > 1
            assert -1 <= columns["gather_score"][0] <= 1 and -0.5 <= columns["aggregate_score"][0] <= 1
            assert 0 < columns["segment_share"][0] <= 1

    def test_of_branches_are_there_for_the_spliced_heads_alone(self) -> None:
        model = pico_hybrid(SPLICE, vocab_size=1024)
        given = (model, pico_tokenizer(), documents(2), mixers(model))
        found, own = structural_scores(*given, branch=True), structural_scores(*given)
        assert set(found) == set(TestBranch.spliced) and set(found) < set(own)
        assert all(np.abs(found[h]["entropy"] - own[h]["entropy"]).max() > 1e-3 for h in found)
