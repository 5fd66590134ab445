"""Baselines are what their formulas say: derivatives, integrals, divergences and largest weights, on every structure.

Checked against whole passes with hooks of this file's own, on left-padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bench.plugins import baselines
from bench.plugins.baselines import (
    attribution,
    head_factors,
    integrated_gradients,
    layer_divergence,
    margin_slopes,
    retrieval_score,
)
from bench.plugins.scaling import scaled
from surgery.data.choice_scores import arguments
from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError, ProbeError
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.models.hooks import record
from surgery.models.lookup import block_of, family_of, mixer_of, structure_of
from surgery.probes.documents import Document, Question, Writer, rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.sentences import sentence
from surgery.types import MixerSpec
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer, prompts, tokens

MODELS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: pico_base(n_groups=1),
    "mamba2-groups": lambda: pico_base(n_groups=2),
    "mamba": lambda: pico_family("mamba"),
    "zamba2": lambda: pico_family("zamba2"),  # one block of weights in layers 1 and 3, and two mixers in each
    "llama": lambda: pico_family("llama"),
    "hybrid": lambda: pico_hybrid([pico_site(1, [2])]),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def run_of(make: Callable[[], Any], batch: EncodedBatch | None = None) -> CleanRun:
    """In double precision, but for what the models themselves compute in single."""
    return run_clean(make().double(), prompts() if batch is None else batch)


@contextmanager
def changed(run: CleanRun, spec: MixerSpec, module: nn.Module, change: Callable[[Any], Any], after: bool) -> Iterator:
    """Replaces a module's first argument, or its output, while the block of `spec` runs and in no other."""
    inside = [False]
    block = block_of(run.model, spec.layer, spec)
    handles = [block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))]
    handles.append(block.register_forward_hook(lambda *_: inside.__setitem__(0, False)))
    if after:
        handles.append(module.register_forward_hook(lambda _, __, out: change(out) if inside[0] else None))
    else:
        handles.append(module.register_forward_pre_hook(lambda _, args: (change(args[0]),) if inside[0] else None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_logits(run: CleanRun, repeats: int = 1) -> Tensor:
    """(repeats*B,V) at the query, by whole passes of the model."""
    mask = None if run.prompt.mask is None else run.prompt.mask.repeat(repeats, 1)
    inputs = arguments(run.model, run.batch.input_ids.repeat(repeats, 1), mask)
    with torch.no_grad():
        return run.model(**inputs, use_cache=False).logits[:, -1].double()


def margins(logits_RV: Tensor, batch: EncodedBatch) -> Tensor:
    """(repeats,B), in double precision."""
    ids_BK, gold_B1 = batch.choice_ids[:, 0], batch.gold
    scores = torch.stack([x.gather(1, ids_BK) for x in logits_RV.split(len(batch))])
    gold = scores.gather(2, gold_B1.expand(len(scores), -1, -1))[..., 0]
    return gold - scores.masked_fill(torch.zeros_like(scores).scatter(2, gold_B1.expand(len(scores), -1, -1), 1).bool(),
                                     -torch.inf).amax(2)  # fmt: skip


def scaled_margins(run: CleanRun, spec: MixerSpec, factors_RH: Tensor) -> Tensor:
    """(R,B) with the heads of one mixer multiplied, at every token."""
    each_H = factors_RH.repeat_interleave(len(run.batch), 0)

    def scale(u: Tensor) -> Tensor:
        return u * each_H.repeat_interleave(u.shape[-1] // spec.num_heads, 1)[:, None].to(u.dtype)

    out_proj = structure_of(spec).out_proj(mixer_of(run.model, spec))
    with changed(run, spec, out_proj, scale, after=False):
        return margins(whole_logits(run, len(factors_RH)), run.batch)


def naive_integrated_gradients(run: CleanRun, steps: int) -> Tensor:
    """`integrated_gradients` by whole passes, the heads scaled while they run."""
    attributions = []
    for spec in run.specs:
        slopes = []
        for step in range(steps):
            with torch.enable_grad():
                factor_BH = head_factors(run, spec, (step + 0.5) / steps)
                with scaled(run.model, [spec], {spec.name: factor_BH}):
                    slopes += margin_slopes(run, [factor_BH])
        attributions.append(torch.stack(slopes).mean(0).T)
    return torch.cat(attributions).float().cpu()


@every_model
def test_attribution_is_the_derivative_by_a_factor_on_the_head(make: Any) -> None:
    run, step = run_of(make), 1e-3
    found = []
    for spec in run.specs:
        moves = step * torch.eye(spec.num_heads)
        up, down = scaled_margins(run, spec, 1 + torch.cat([moves, -moves])).chunk(2)
        found.append((up - down) / (2 * step))
    slopes = torch.cat(found).float()
    assert attribution(run).shape == (sum(spec.num_heads for spec in run.specs), len(run.batch))
    torch.testing.assert_close(attribution(run), slopes, atol=2e-3 * float(slopes.abs().max()), rtol=0)


@every_model
def test_integrated_gradients_equal_whole_passes(make: Any) -> None:
    run = run_of(make)
    run.specs = run.specs[1:4]
    fast, naive = integrated_gradients(run, 2), naive_integrated_gradients(run, 2)
    torch.testing.assert_close(fast, naive, atol=1e-4 * float(naive.abs().max()), rtol=0)
    assert (fast - attribution(run)).abs().max() > 1e-2 * float(naive.abs().max())


@every_model
def test_layer_divergence_is_the_definition(make: Any) -> None:
    """Against a hook of this test's own: the mixer's output is replaced by the bias of its `out_proj`."""
    run = run_of(make)
    run.specs = run.specs[:3]
    expected, clean = [], whole_logits(run).log_softmax(-1)
    for spec in run.specs:
        mixer = mixer_of(run.model, spec)
        bias = structure_of(spec).out_proj(mixer).bias

        def empty(out: Any, bias: Tensor | None = bias) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            left = torch.zeros_like(first) + (0 if bias is None else bias)
            return (left, *out[1:]) if isinstance(out, tuple) else left

        with changed(run, spec, mixer, empty, after=True):
            removed = whole_logits(run).log_softmax(-1)
        expected.append((clean.exp() * (clean - removed)).sum(-1).float())
    torch.testing.assert_close(layer_divergence(run), torch.stack(expected), atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_the_bias_of_out_proj_is_left() -> None:
    """A mixer that puts out its bias alone is not missed."""
    model = pico_base(use_bias=True)
    model.backbone.layers[1].mixer.out_proj.weight.zero_()
    run = run_clean(model, prompts())
    found = layer_divergence(run)
    assert model.backbone.layers[1].mixer.out_proj.bias.abs().max() > 0.1
    assert found[1].max() < 1e-6 < 1e-3 < found[[0, 2]].min()
    assert attribution(run)[4:8].abs().max() == 0


@every_model
def test_a_prompt_scores_as_it_does_alone_and_unpadded(make: Any) -> None:
    batch = prompts()
    row, shift = batch[:1], int((batch.attention_mask[0] == 0).sum())
    by_token = {k: getattr(row, k)[:, shift:] for k in ("input_ids", "attention_mask", "answers")}
    places = {k: getattr(row, k) - shift for k in ("query", "segment_start", "segment_end", "answer_token")}
    alone, padded = run_of(make, replace(row, **by_token, **places)), run_of(make, batch)
    assert shift > 0
    for score in (attribution, layer_divergence):
        torch.testing.assert_close(score(alone), score(padded)[:, :1], atol=1e-4, rtol=1e-3)


@every_model
def test_baselines_leave_the_model_alone(make: Any) -> None:
    model = make()
    run = run_clean(model, prompts())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attribution(run), integrated_gradients(run, 1), layer_divergence(run)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# The retrieval-head score.


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return pico_tokenizer()


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("name", "more"),
    [("llama", {}), ("qwen2", WINDOW), ("gpt_neox", {}), ("zamba2", {}), ("granite", {}), ("falcon_h1", {})],
)
def test_the_token_read_most_is_that_of_eager_attention(more: dict[str, Any], name: str) -> None:
    """At every token of a text; grouped keys, sliding windows and shared modules included."""
    model, ids = pico_family(name, **more), tokens(1, 21)
    specs = [s for s in family_of(model.config).mixers(model.config) if not s.is_ssm]
    with torch.no_grad():
        found = baselines.most_read(model, specs, ids, torch.arange(21), hidden=False)
        model.set_attn_implementation("eager")
        weights = [w for w in model(ids, use_cache=False, output_attentions=True).attentions if w is not None]
    assert list(found) == [s.name for s in specs]
    for spec, weights_1HTT in zip(specs, weights, strict=True):
        assert torch.equal(found[spec.name], weights_1HTT[0].argmax(-1))


@pytest.mark.parametrize("name", ["mamba2", "mamba", "llamba"])
def test_what_an_ssm_head_reads_most_is_what_it_mixes_in_most_of(name: str) -> None:
    """Against loops over heads, queries and tokens; in Mamba-1 every channel of a head has weights of its own."""
    model, ids, queries = pico_family(name), tokens(1, 13), torch.tensor([4, 12])
    spec = family_of(model.config).mixers(model.config)[1]
    mixer, structure = mixer_of(model, spec), structure_of(spec)
    with torch.no_grad(), record(model, [spec]) as trace:
        model(ids, use_cache=False)
    with torch.no_grad():
        streams = structure.streams(mixer, spec, trace.projected[spec.name])
        weights = structure.hidden_attention(mixer, spec, streams)[0]
        sizes = baselines.contribution_sizes(model, spec, trace.projected[spec.name], queries).sqrt()
    width = len(weights) // spec.num_heads
    for head in range(spec.num_heads):
        for r, t in enumerate(queries.tolist()):
            for s in range(13):
                expected = (weights[head * width : (head + 1) * width, t, s] * streams.x[0, s, head]).norm()
                torch.testing.assert_close(sizes[head, r, s], expected)


def copying_document(decoy: bool = False, first: bool = False) -> Document:
    """`q:17;b:42;` and so on, then the answer 42; a decoy is a 42 before the segment, or after a `first` one."""
    writer = Writer()
    places = [writer.add("42" if decoy else "33"), writer.add(".")]
    writer.add("q:17;b:")
    places += [writer.add("42"), writer.add(";")]
    writer.add("f:58;b:")
    value, end = places[:2] if first else places[2:]
    question = Question(
        (len(writer.text), len(writer.text) + 2), ("42", "58"), 0, segment=(value[0], end[1]), value=value
    )
    return Document("copy", writer.text + "42", (question,))


@torch.no_grad()
def planted_reader(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """One attention layer without positions, between SSM layers; head 0 reads the token `text`, head 1 the `;`."""
    own = {"num_heads": 2, "num_heads_kv": 2, "head_dim": 16, "d_conv": 0, "rotary_emb_dim": 0, "qkv_proj_bias": True}
    model = pico_family("mamba2attn", vocab_size=1024, attn_layer_idx=[0], attn_cfg=own)
    block = model.backbone.layers[0]
    block.norm.weight.fill_(1)
    query, key, _ = block.mixer.in_proj.weight.split(32)
    query_bias, key_bias, _ = block.mixer.in_proj.bias.split(32)
    for part in (query, key, query_bias, key_bias):
        part.zero_()
    for head, wanted in enumerate((text, ";")):
        vector = model.get_input_embeddings().weight[tokenizer(wanted)["input_ids"][0]]
        query_bias[16 * head] = 1
        key[16 * head] = vector / vector.norm()
    return model


def test_a_planted_reader_scores_one_and_no_other_does(tokenizer: PreTrainedTokenizerBase) -> None:
    scores = retrieval_score(planted_reader(tokenizer, "42"), tokenizer, [copying_document()])
    assert scores[:2].tolist() == [1, 0]
    assert scores[2:].isnan().all()


def test_the_same_token_outside_the_segment_does_not_count(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without positions both places have the same weight. Whichever is taken, it is one document's segment alone."""
    documents = [copying_document(decoy=True), copying_document(decoy=True, first=True)]
    assert retrieval_score(planted_reader(tokenizer, "42"), tokenizer, documents)[:2].tolist() == [0.5, 0]


def test_every_token_of_an_answer_is_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    """A key that spans two tokens, as the answer; and an answer whose second token is not in the segment."""
    text = "bako:11;zumi:22;which is:"
    long = Document("copy", text + "bako", (Question((25, 29), (), 0, segment=(0, 8), value=(0, 4)),))
    part = Document("copy", text + "bami", (Question((25, 29), (), 0, segment=(0, 8), value=(0, 4)),))
    for document, count in ((long, None), (part, 1)):
        batch = encode([document], tokenizer)
        queries, right = baselines._copies(batch)
        answer = batch.answers[0].nonzero()[:, 0].tolist()
        assert len(answer) > 1
        assert len(queries) == (count or len(answer))
        for query, row in zip(queries.tolist(), right, strict=True):
            assert query + 1 in answer
            places = row.nonzero()[:, 0].tolist()
            assert places and max(places) <= int(batch.segment_end[0, 0])
            assert {int(batch.input_ids[0, p]) for p in places} == {int(batch.input_ids[0, query + 1])}


def test_scores_are_shares_over_all_questions_and_ssm_heads_are_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """In a model with both: NaN for its SSM heads unless hidden attention is asked for, which changes no other."""
    model, documents = pico_family("zamba2", vocab_size=1024), [kv_document(rng_of("r", i), 4, 2) for i in range(3)]
    plain = retrieval_score(model, tokenizer, documents)
    every = retrieval_score(model, tokenizer, documents, hidden=True)
    ssm = torch.cat([torch.full((s.num_heads,), s.is_ssm) for s in family_of(model.config).mixers(model.config)])
    assert plain[ssm].isnan().all() and not every.isnan().any()
    assert torch.equal(plain[~ssm], every[~ssm])
    torch.testing.assert_close(every * 6, (every * 6).round(), atol=1e-5, rtol=0)
    assert every.max() > 0


def test_nothing_to_measure_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    documents = [kv_document(rng_of("r"), 4)]
    with pytest.raises(ModelError, match="no attention head"):
        retrieval_score(pico_base(), tokenizer, documents)
    with pytest.raises(ProbeError, match="without a token to copy"):
        retrieval_score(pico_family("llama", vocab_size=1024), tokenizer, [sentence(rng_of("s"))])
