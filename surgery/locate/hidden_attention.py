"""Attention matrices of every head, hidden or not, and scores of their shape. docs/LOCATE.md.

An SSM head mixes like linear attention, `y_t = sum_s a[t,s] x_s` (Dao and Gu, arXiv 2405.21060; Ali et al., arXiv
2403.01590), so it has an attention matrix:

    share[t,s] = |a[t,s] x_s| / sum_s' |a[t,s'] x_s'|

the length of what token s adds to the head's output at t, as a part of the sum over the past. `a` alone does not tell
heads apart: with `n_groups=1` all heads of a layer share C.B, and what differs besides the decay is x. In a channel
group of Mamba-1 the length is taken over its channels, each with a matrix of its own. For softmax attention the share
is the weight. The skip `D x_t` is not part of it.

Structural scores describe where a head looks, not what it does: a head may read sharply and write nothing. Roles come
from ablation.
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
from surgery.errors import ModelError, PlanError, ProbeError
from surgery.hybrid.sites import is_whole, splice_sites
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
            raise PlanError("head", str(head), "The model has no such head.")
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
    """What the heads' matrices are made from, of one forward pass over unpadded prompts.

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
            constant: hold queries and keys constant. An SSM head is left with its decay, attention with uniform rows.
        """
        if self.branch is not None:
            spliced, weights_BHTT = self.branch.get(spec.name, ([], None))
            lacking = [h for h in heads if h not in spliced]
            if weights_BHTT is None or lacking:
                name = f"{spec.name}{lacking[0]}"
                raise PlanError("head", name, f"Heads spliced there: {', '.join(map(str, spliced)) or 'nothing'}.")
            weights_BHTT = weights_BHTT[:, [spliced.index(h) for h in heads]]
        elif not spec.is_ssm:
            weights_BHTT = self.attention[spec.name][:, list(heads)]
        else:
            return _normalised(self._contributions(spec, heads, constant))
        return _normalised(torch.ones_like(weights_BHTT).tril()) if constant else weights_BHTT

    def _contributions(self, spec: MixerSpec, heads: Sequence[int], constant: bool) -> Tensor:
        """(B,H,T,T) the length of what token s adds at token t."""
        structure, mixer = structure_of(spec), mixer_of(self.model, spec)
        streams = structure.streams(mixer, spec, self.activations.projected[spec.name])
        # fp32 at least: sums of it are exponentiated.
        wide = torch.promote_types(streams.x.dtype, torch.float32)
        streams = replace(streams, **{name: getattr(streams, name).to(wide) for name in ("x", "key", "query", "step")})
        if constant:  # C.B is 1, and the channels of the state count alike
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
    """(B,T,T) of one channel group, whose channels have a matrix each. A whole layer's would not fit in memory."""
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
    """Run the prompts and keep what the matrices of these mixers are made from."""
    if not specs:
        raise PlanError("heads", "none", "Give at least one.")
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
                hint = "It bypasses the attention interface of transformers, so its weights cannot be observed."
                raise ModelError("attention", spec.name, hint)
            attention[spec.name] = weights.pop(0)
    return _Patterns(model, activations, attention, None)


def _branch_weights(model: PreTrainedModel, input_ids: Tensor) -> dict[str, tuple[list[int], Tensor]]:
    """The attention weights that the hybrid itself returns, with the heads that they belong to."""
    sites = splice_sites(getattr(model.config, "splice", None))
    if not sites:
        raise PlanError("model", model.config.model_type, "Nothing is spliced into it. Leave `branch` out.")
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
    """Compute softmax attention's weights by module, one (B,H,T,T) a call, since kernels do not return them.

    They come from the queries and keys that the model's own implementation gets, which runs unchanged.
    """
    calls: dict[nn.Module, list[Tensor]] = {}
    name = model.config._attn_implementation or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = partial(
        _attend_observed, calls, original
    )  # this object's entry, before the library's
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
    """An attention function: (B,H,T,P) queries, keys and values of as many or fewer heads."""
    per_group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.float() @ key.float().repeat_interleave(per_group, dim=1).transpose(2, 3) * scale
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:  # a window, say
        is_seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        scores = scores.masked_fill(~is_seen[..., : scores.shape[-1]], -torch.inf)
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    calls.setdefault(module, []).append(weights)
    if original is not None:
        output: tuple = original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output
    mixed = weights.to(value.dtype) @ value.repeat_interleave(per_group, dim=1)  # as the models' eager default
    return mixed.transpose(1, 2), weights


def _numpy(shares: Tensor) -> Shares:
    array: Shares = shares.detach().double().cpu().numpy()
    return array


def segment_spans(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[Span, ...]:
    """Locate every `key:value` line of a KV-retrieval document in its tokens, as `encode` counts them.

    Returns:
        (start, stop) of each line.

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
    offsets = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    first, last = np.asarray(offsets).T
    # The tokens that touch the line: as in `encode`, where a token's bytes may be split among several.
    touches = [np.flatnonzero((first < stop) & (last > start)) for start, stop in spans]
    return tuple((int(tokens[0]), int(tokens[-1]) + 1) for tokens in touches)


def structural_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    specs: Sequence[MixerSpec],
    branch: bool = False,
) -> dict[HeadId, dict[str, Shares]]:
    """Score the shape of every head's attention pattern: the columns of the method `hidden_attention`.

    Prompts are run one by one, to the query of the last question.

    Args:
        branch: score the spliced attention heads, where there are any, instead of the mixers themselves.

    Returns:
        By head and column, (N,): a number a document.

    Raises:
        ProbeError: no documents, or of another task than kv_retrieval.
    """
    if not documents:
        raise ProbeError("documents", 0, "Give at least one.")
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
    """By column, (H,) of one prompt."""
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
    """Collect what every head of these mixers reads at the query of each document, for `write_page`.

    Args:
        full: heads whose whole matrix is included, T^2 numbers each.
        branch: use the spliced attention heads, where there are any, instead of the mixers themselves.

    Raises:
        PlanError: a head of `full` is not among those.
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
        raise PlanError("full", lacking[0], "It is not a head of these mixers.")
    places = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
    marks = {name: int(position[0, -1]) for name, position in places.items() if int(position[0, -1]) >= 0}
    return Prompt(tokens, marks, rows, matrices)
