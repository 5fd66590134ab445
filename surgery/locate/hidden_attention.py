"""Attention matrices of SSM and attention heads, and scores of their shape (docs/LOCATE.md).

An SSM head mixes tokens like linear attention, `y_t = sum_s a[t,s] x_s` (Dao and Gu, arXiv 2405.21060; Ali et al.,
arXiv 2403.01590). So it has a hidden attention matrix:

    share[t,s] = |a[t,s] x_s| / sum_s' |a[t,s'] x_s'|

A share is the magnitude of what token s adds to the head's output at t, divided by the sum over all past tokens. `a`
alone does not distinguish heads: with `n_groups=1` all heads of a layer share C.B, and differ in the decay and in x.
In Mamba-1 every channel of a group has its own `a`, and the magnitude is the norm over the channels. For softmax
attention the share is the attention weight. The skip connection `D x_t` is not included.

These scores describe where a head looks, not its effect: a head may read sharply and write nothing. Roles come from
ablation.
Shape legend: B prompts, T tokens, H heads, P head width, K segments, N documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.offsets import tokenized
from surgery.errors import ModelError, PlanError, ProbeError
from surgery.hybrid.configuration_hybrid import is_whole, splice_sites
from surgery.interventions.hooks import ActivationCache, record
from surgery.locate.attention_shape import (
    Shares,
    Span,
    aggregate_score,
    effective_tokens,
    entropy,
    gather_score,
    sharpness,
)
from surgery.models.layouts import Streams
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.mixers.mamba1 import Mamba1Structure
from surgery.probes.documents import Document
from surgery.probes.kv_retrieval import HEADER
from surgery.report.heads_page import Prompt, PromptAttention
from surgery.types import HeadId, MixerSpec


def head_matrices(
    model: PreTrainedModel, batch: EncodedBatch, heads: Sequence[HeadId], branch: bool = False
) -> dict[HeadId, Shares]:
    """Compute the attention matrix of each head.

    Args:
        model: in eval mode.
        batch: prompts of one length, without padding.
        branch: use the attention that was spliced in at these heads, instead of the SSM heads themselves.

    Returns:
        By head, (B,T,T) shares: row t is what token t reads. Rows sum to 1 and end at the diagonal. A row in which
        every contribution is exactly zero stays zero.

    Raises:
        ProbeError: there is padding.
        PlanError: the model has no such head, or with `branch` nothing is spliced there.
    """
    specs = {spec.name: spec for spec in family_of(model.config).mixers(model.config)}
    for head in heads:
        if head.mixer not in specs or head.head >= specs[head.mixer].num_heads:
            raise PlanError("head", str(head), "The model has no such head. `surgery inspect` lists the heads.")
    mixers = [spec for spec in specs.values() if any(h.mixer == spec.name for h in heads)]
    patterns = _observe_patterns(model, batch, mixers, branch)
    matrices: dict[HeadId, Shares] = {}
    for spec in mixers:
        of_mixer = [h for h in heads if h.mixer == spec.name]
        shares_BHTT = patterns.shares(spec, [h.head for h in of_mixer])
        matrices.update({head: _numpy(shares_BHTT[:, i]) for i, head in enumerate(of_mixer)})
    return matrices


@dataclass(frozen=True)
class _Patterns:
    """Activations of one forward pass over unpadded prompts, from which the heads' matrices are computed.

    Attributes:
        attention: by `MixerSpec.name`, (B,H,T,T) the weights of attention mixers.
        branch: by name, the spliced heads and their weights (B,h,T,T); None for the matrices of the mixers themselves.
    """

    model: PreTrainedModel
    activations: ActivationCache
    attention: dict[str, Tensor]
    branch: dict[str, tuple[list[int], Tensor]] | None

    def heads(self, spec: MixerSpec) -> list[int]:
        """Heads of a mixer that have a matrix."""
        if self.branch is None:
            return list(range(spec.num_heads))
        return self.branch[spec.name][0] if spec.name in self.branch else []

    @torch.no_grad()
    def shares(self, spec: MixerSpec, heads: Sequence[int], constant: bool = False) -> Tensor:
        """(B,H,T,T) shares, in fp32 at least.

        Args:
            constant: hold queries and keys constant. The rows of an SSM head then show its decay alone, and those of
                softmax attention are uniform.
        """
        if self.branch is not None:
            spliced, weights_BHTT = self.branch.get(spec.name, ([], None))
            lacking = [h for h in heads if h not in spliced]
            if weights_BHTT is None or lacking:
                name = f"{spec.name}{lacking[0]}"
                present = ", ".join(f"{spec.name}{head}" for head in spliced) or "none"
                raise PlanError("head", name, f"It is not spliced. Spliced heads of this layer: {present}.")
            weights_BHTT = weights_BHTT[:, [spliced.index(h) for h in heads]]
        elif not spec.is_ssm:
            weights_BHTT = self.attention[spec.name][:, list(heads)]
        else:
            return _normalised(self._contributions(spec, heads, constant))
        return _normalised(torch.ones_like(weights_BHTT).tril()) if constant else weights_BHTT

    def _contributions(self, spec: MixerSpec, heads: Sequence[int], constant: bool) -> Tensor:
        """(B,H,T,T) magnitude of what token s adds at token t."""
        structure, mixer = structure_of(spec), mixer_of(self.model, spec)
        streams = structure.streams(mixer, spec, self.activations.projected[spec.name]).in_fp32()
        if constant:  # C.B becomes 1, with equal weight on all channels of the state
            key, query = torch.full_like(streams.key, 1 / spec.state_size), torch.ones_like(streams.query)
            streams = replace(streams, key=key, query=query)
        if isinstance(structure, Mamba1Structure):
            groups = [_group_contributions(structure, mixer, spec, streams, head) for head in heads]
            return torch.stack(groups, dim=1)
        weights_BHTT = structure.hidden_attention(mixer, spec, streams)[:, list(heads)]
        length_BHT = streams.x[:, :, list(heads)].norm(dim=-1).transpose(1, 2)
        return weights_BHTT.abs() * length_BHT[:, :, None, :]


def _group_contributions(
    structure: Mamba1Structure, mixer: nn.Module, spec: MixerSpec, streams: Streams, head: int
) -> Tensor:
    """(B,T,T) magnitudes of one channel group of Mamba-1. The matrices of a whole layer would not fit in memory."""
    channels = structure.weight_slices(spec, head).out
    part = nn.Module()
    part.A_log = nn.Parameter(mixer.A_log[channels], requires_grad=False)
    group = replace(streams, x=streams.x[:, :, head, None], step=streams.step[..., channels])
    weights_BPTT = structure.hidden_attention(part, replace(spec, num_heads=1), group)
    return (weights_BPTT * group.x[:, :, 0].transpose(1, 2)[:, :, None, :]).norm(dim=1)


def _normalised(lengths: Tensor) -> Tensor:
    """Scale rows to sum to 1."""
    return lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)


@torch.no_grad()
def _observe_patterns(
    model: PreTrainedModel, batch: EncodedBatch, specs: Sequence[MixerSpec], branch: bool
) -> _Patterns:
    """Run the prompts and record the activations from which the matrices of these mixers are computed."""
    if not specs:
        raise PlanError("heads", "none", "Pass at least one head.")
    if not bool(batch.attention_mask.all()):
        raise ProbeError("batch", "padded", "Hidden attention needs prompts of one length. Encode them one by one.")
    input_ids = batch.input_ids.to(model.device)
    if branch:
        return _Patterns(model, ActivationCache(), {}, _branch_weights(model, input_ids))
    with record(model, specs) as activations, _observed_attention(model) as calls:
        model(input_ids, use_cache=False, logits_to_keep=1)
    attention: dict[str, Tensor] = {}
    for spec in family_of(model.config).mixers(model.config):
        if not spec.is_ssm:  # blocks that share their weights are run one after the other
            weights = calls.get(mixer_of(model, spec))
            if not weights:
                hint = (
                    "It bypasses the attention interface of transformers. Remove hidden_attention from locate.methods."
                )
                raise ModelError("attention", spec.name, hint)
            attention[spec.name] = weights.pop(0)
    return _Patterns(model, activations, attention, None)


def _branch_weights(model: PreTrainedModel, input_ids: Tensor) -> dict[str, tuple[list[int], Tensor]]:
    """Attention weights that the hybrid returns, with the spliced heads that they belong to, by mixer."""
    sites = splice_sites(getattr(model.config, "splice", None))
    if not sites:
        raise PlanError("model", model.config.model_type, "The model has no spliced heads. Set branch=False.")
    B, T = input_ids.shape
    every = torch.arange(T, device=input_ids.device).expand(B, T)
    rows = model(input_ids, use_cache=False, logits_to_keep=1, splice_queries=every).splice_attentions
    branch = {}
    for layer, weights_BHTT in zip(sorted(sites), rows, strict=True):
        whole = is_whole(sites[layer])
        heads = list(range(weights_BHTT.shape[1])) if whole else list(sites[layer]["heads"])
        branch[f"L{layer}{'A' if whole else 'H'}"] = (heads, weights_BHTT)
    return branch


@contextmanager
def _observed_attention(model: PreTrainedModel) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Compute the weights of softmax attention by module, (B,H,T,T) for each call. Kernels do not return them.

    They are computed from the queries and keys passed to the model's own implementation, which runs unchanged.
    """
    calls: dict[nn.Module, list[Tensor]] = {}
    name = model.config._attn_implementation or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get(name)
    # An entry of this object hides the library's entry of the same name.
    ALL_ATTENTION_FUNCTIONS[name] = partial(_attend_observed, calls, original)
    try:
        yield calls
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _attend_observed(
    calls: dict[nn.Module, list[Tensor]],
    original: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function that records its weights. Queries are (B,H,T,P); keys and values may have fewer heads."""
    per_group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.float() @ key.float().repeat_interleave(per_group, dim=1).transpose(2, 3) * scale
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:  # such as a sliding window
        is_seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        scores = scores.masked_fill(~is_seen[..., : scores.shape[-1]], -torch.inf)
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    calls.setdefault(module, []).append(weights)
    if original is not None:
        output: tuple = original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output
    mixed = weights.to(value.dtype) @ value.repeat_interleave(per_group, dim=1)  # as in the models' eager attention
    return mixed.transpose(1, 2), weights


def _numpy(shares: Tensor) -> Shares:
    array: Shares = shares.detach().double().cpu().numpy()
    return array


def segment_spans(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[Span, ...]:
    """Find the tokens of every `key:value` line of a KV-retrieval document, as `encode` splits it.

    Returns:
        (start, stop) token indices of each line.

    Raises:
        ProbeError: the document is of another task.
    """
    question = document.questions[-1] if document.questions else None
    count = len(question.choices) if question else 0
    spans, start = [], len(HEADER)
    for line in document.text[start:].split("\n")[:count]:
        spans.append((start, start + len(line) + 1))
        start += len(line) + 1
    if not document.text.startswith(HEADER) or question is None or question.segment not in spans:
        raise ProbeError("documents", document.task, "Structural scores need documents of kv_retrieval.")
    (tokens,) = tokenized(tokenizer, [document.text])
    first, last = np.asarray(tokens.starts), np.asarray(tokens.ends)
    # Tokens that overlap the line. As in `encode`, several tokens may share one character.
    touches = [np.flatnonzero((first < stop) & (last > start)) for start, stop in spans]
    return tuple((int(touching[0]), int(touching[-1]) + 1) for touching in touches)


def structural_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    specs: Sequence[MixerSpec],
    branch: bool = False,
) -> dict[HeadId, dict[str, Shares]]:
    """Score the shape of every head's attention pattern: the columns of the method `hidden_attention`.

    Prompts are run one by one, up to the query of the last question.

    Args:
        documents: KV-retrieval prompts.
        specs: mixers whose heads are scored.
        branch: score the spliced attention heads instead of the mixers.

    Returns:
        For each head and column, (N,): one score per document.

    Raises:
        ProbeError: no documents, or of another task than kv_retrieval.
    """
    if not documents:
        raise ProbeError("documents", 0, "Pass at least one document.")
    scores: dict[HeadId, dict[str, list[float]]] = {}
    for document in documents:
        batch = encode([document], tokenizer, until_answer=True)
        segments, gold = segment_spans(document, tokenizer), document.questions[-1].gold
        patterns = _observe_patterns(model, batch, specs, branch)
        for spec in specs:
            columns = _scores(patterns, spec, segments, gold)
            for i, head in enumerate(patterns.heads(spec)):
                of_head = scores.setdefault(HeadId(spec.layer, head, spec.letter), {name: [] for name in columns})
                for name, values_H in columns.items():
                    of_head[name].append(float(values_H[i]))
    return {head: {name: np.asarray(v) for name, v in of_head.items()} for head, of_head in scores.items()}


def _scores(patterns: _Patterns, spec: MixerSpec, segments: Sequence[Span], gold: int) -> dict[str, Shares]:
    """Scores of one prompt, (H,) by column."""
    heads = patterns.heads(spec)
    if not heads:
        return {}
    ends = [stop - 1 for _, stop in segments]
    matrix_HTT, constant_HTT = patterns.shares(spec, heads)[0], patterns.shares(spec, heads, constant=True)[0]
    row_HT = _numpy(matrix_HTT[:, -1])
    return {
        "gather_score": gather_score(_numpy(matrix_HTT[:, ends]), _numpy(constant_HTT[:, ends]), segments),
        "aggregate_score": aggregate_score(row_HT, segments, gold),
        "segment_share": np.asarray(sum(row_HT[:, start:stop].sum(-1) for start, stop in segments)),
        "entropy": entropy(row_HT),
        "effective_tokens": effective_tokens(row_HT),
        "sharpness": sharpness(row_HT),
    }


def prompt_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    specs: Sequence[MixerSpec],
    full: Sequence[HeadId] = (),
    branch: bool = False,
) -> PromptAttention:
    """Collect the attention of every head of these mixers at the query of each document, for `write_page`.

    Args:
        full: heads whose whole matrix is included, T^2 numbers each.
        branch: use the spliced attention heads instead of the mixers.

    Raises:
        PlanError: a head of `full` does not belong to these mixers.
    """
    prompts = []
    for document in documents:
        batch = encode([document], tokenizer, until_answer=True)
        patterns = _observe_patterns(model, batch, specs, branch)
        tokens = tuple(tokenizer.decode([i]) for i in batch.input_ids[0].tolist())
        prompts.append(_prompt(patterns, batch, tokens, specs, list(map(str, full))))
    return PromptAttention(tuple(prompts))


def _prompt(
    patterns: _Patterns,
    batch: EncodedBatch,
    tokens: tuple[str, ...],
    specs: Sequence[MixerSpec],
    full: Sequence[str],
) -> Prompt:
    rows: dict[str, Shares] = {}
    matrices: dict[str, Shares] = {}
    for spec in (s for s in specs if patterns.heads(s)):
        shares_HTT = patterns.shares(spec, patterns.heads(spec))[0]
        for head, shares_TT in zip(patterns.heads(spec), shares_HTT, strict=True):
            name = str(HeadId(spec.layer, head, spec.letter))
            rows[name] = _numpy(shares_TT[-1])
            if name in full:
                matrices[name] = _numpy(shares_TT)
    lacking = [name for name in full if name not in matrices]
    if lacking:
        raise PlanError("full", lacking[0], "It is not a head of the mixers in `specs`.")
    places = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
    marks = {name: int(position[0, -1]) for name, position in places.items() if int(position[0, -1]) >= 0}
    return Prompt(tokens, marks, rows, matrices)
