"""What every head reads: attention matrices, hidden or not, and what their shape says. docs/LOCATE.md.

Owns: shares, and which rows are scored. Must never know: files, selection, pictures. An SSM head mixes like linear
attention, `y_t = sum_s a[t,s] x_s` (Dao and Gu, arXiv 2405.21060; Ali et al., arXiv 2403.01590), so it has a matrix:

    share[t,s] = |a[t,s] x_s| / sum_s' |a[t,s'] x_s'|

the length of what token s adds to the head's output at t, as a part of the sum over the past. `a` alone does not tell
heads apart: with `n_groups=1` all heads of a layer share C.B, and what differs besides the decay is x. In a channel
group of Mamba-1 the length is taken over its channels, each with a matrix of its own. Softmax attention's share is its
weight. The skip `D x_t` is not part of it.

Structural scores describe, they do not measure: a head may read sharply and write nothing. Roles come from ablation.
Shape legend: B prompts, T tokens, H heads asked for, P head width, K segments, N documents.
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
from surgery.interventions.hooks import Trace, record
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

STRUCTURAL = {
    "gather_score": "share of each segment's end on its own segment, less what the decay alone gives; at most 1",
    "aggregate_score": "the gold segment's part of what the query reads of all segments: 1 all of it, 0 as by chance",
    "segment_share": "share of all segments in the query's row; where it is small the aggregate score says little",
    "entropy": "of the query's row, 1 where it is uniform",
    "effective_tokens": "exp of that entropy, in tokens",
    "sharpness": "the largest step between neighbouring tokens of the query's row",
}


def head_matrices(
    model: PreTrainedModel, batch: EncodedBatch, heads: Sequence[HeadId], branch: bool = False
) -> dict[HeadId, Shares]:
    """(B,T,T) the shares of each head: row t says what token t reads. Rows sum to 1 and end at the diagonal.

    A row in which every contribution is exactly zero stays zero.

    Args:
        batch: prompts of one length, without padding; the model in eval mode.
        branch: of the attention that was spliced in at these heads, instead of the SSM heads themselves.

    Raises:
        ProbeError: there is padding. PlanError: no such head, or with `branch` nothing spliced at it.
    """
    specs = {spec.name: spec for spec in family_of(model.config).mixers(model.config)}
    for head in heads:
        if head.mixer not in specs or head.head >= specs[head.mixer].num_heads:
            raise PlanError("head", str(head), "The model has no such head.")
    asked = [spec for spec in specs.values() if any(h.mixer == spec.name for h in heads)]
    run = _run(model, batch, asked, branch)
    found: dict[HeadId, Shares] = {}
    for spec in asked:
        own = [h for h in heads if h.mixer == spec.name]
        shares_BHTT = run.shares(spec, [h.head for h in own])
        found.update({head: _numpy(shares_BHTT[:, i]) for i, head in enumerate(own)})
    return found


@dataclass(frozen=True)
class _Run:
    """One forward pass over unpadded prompts, and what the heads' matrices are made from.

    Attributes:
        attention: by `MixerSpec.name`, (B,H,T,T) the weights of attention mixers.
        branch: by name, the spliced heads and their weights (B,h,T,T); None where the mixers themselves are asked for.
    """

    model: PreTrainedModel
    trace: Trace
    attention: dict[str, Tensor]
    branch: dict[str, tuple[list[int], Tensor]] | None

    def heads(self, spec: MixerSpec) -> list[int]:
        """Those of a mixer that have a matrix here."""
        if self.branch is None:
            return list(range(spec.num_heads))
        return self.branch[spec.name][0] if spec.name in self.branch else []

    @torch.no_grad()
    def shares(self, spec: MixerSpec, heads: Sequence[int], constant: bool = False) -> Tensor:
        """(B,H,T,T), in fp32 at least.

        Args:
            constant: every query and key alike. An SSM head is left with its decay, attention reads all tokens alike.
        """
        if self.branch is not None:
            spliced, weights_BHTT = self.branch.get(spec.name, ([], None))
            lacking = [h for h in heads if h not in spliced]
            if weights_BHTT is None or lacking:
                name = f"{spec.name}{lacking[0]}"
                raise PlanError("head", name, f"Spliced there: {', '.join(map(str, spliced)) or 'nothing'}.")
            weights_BHTT = weights_BHTT[:, [spliced.index(h) for h in heads]]
        elif not spec.is_ssm:
            weights_BHTT = self.attention[spec.name][:, list(heads)]
        else:
            return _normalised(self._contributions(spec, heads, constant))
        return _normalised(torch.ones_like(weights_BHTT).tril()) if constant else weights_BHTT

    def _contributions(self, spec: MixerSpec, heads: Sequence[int], constant: bool) -> Tensor:
        """(B,H,T,T) the length of what token s adds at token t."""
        structure, mixer = structure_of(spec), mixer_of(self.model, spec)
        found = structure.streams(mixer, spec, self.trace.projected[spec.name])
        # fp32 at least: sums of it are exponentiated.
        wide = torch.promote_types(found.x.dtype, torch.float32)
        streams = replace(found, **{name: getattr(found, name).to(wide) for name in ("x", "key", "query", "step")})
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
    """(B,T,T) of one channel group, whose channels have matrices of their own; those of a layer would not fit."""
    channels = structure.weight_slices(spec, head).out
    part = nn.Module()
    part.A_log = nn.Parameter(mixer.A_log[channels], requires_grad=False)
    own = replace(streams, x=streams.x[:, :, head, None], step=streams.step[..., channels])
    weights_BPTT = structure.hidden_attention(part, replace(spec, num_heads=1), own)
    return (weights_BPTT * own.x[:, :, 0].transpose(1, 2)[:, :, None, :]).norm(dim=1)


def _normalised(lengths: Tensor) -> Tensor:
    """Rows that sum to 1."""
    return lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)


@torch.no_grad()
def _run(model: PreTrainedModel, batch: EncodedBatch, specs: Sequence[MixerSpec], branch: bool) -> _Run:
    if not specs:
        raise PlanError("heads", "none", "Name at least one.")
    if not bool(batch.attention_mask.all()):
        raise ProbeError("batch", "padded", "Hidden attention needs prompts of one length: encode them one by one.")
    input_ids = batch.input_ids.to(model.device)
    if branch:
        return _Run(model, Trace(), {}, _spliced(model, input_ids))
    with record(model, specs) as trace, _observed(model) as calls:
        model(input_ids, use_cache=False, logits_to_keep=1)
    attention: dict[str, Tensor] = {}
    for spec in family_of(model.config).mixers(model.config):
        if not spec.is_ssm:  # blocks that share their weights are run one after the other
            weights = calls.get(mixer_of(model, spec))
            if not weights:
                raise ModelError(
                    "attention", spec.name, "It bypasses transformers' interface, so its weights were not seen."
                )
            attention[spec.name] = weights.pop(0)
    return _Run(model, trace, attention, None)


def _spliced(model: PreTrainedModel, input_ids: Tensor) -> dict[str, tuple[list[int], Tensor]]:
    """The branches' weights, as the model itself hands them out."""
    sites = splice_sites(getattr(model.config, "splice", None))
    if not sites:
        raise PlanError("model", model.config.model_type, "Nothing is spliced there, so there is no branch to read.")
    B, T = input_ids.shape
    every = torch.arange(T, device=input_ids.device).expand(B, T)
    rows = model(input_ids, use_cache=False, logits_to_keep=1, splice_queries=every).splice_attentions
    found = {}
    for layer, weights_BHTT in zip(sorted(sites), rows, strict=True):
        whole = is_whole(sites[layer])
        heads = list(range(weights_BHTT.shape[1])) if whole else list(sites[layer]["heads"])
        found[f"L{layer}{'A' if whole else 'H'}"] = (heads, weights_BHTT)
    return found


@contextmanager
def _observed(model: PreTrainedModel) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Softmax attention's weights by module, one (B,H,T,T) a call: kernels do not give them, so they are made here.

    They come from the very queries and keys that the model's own implementation gets, which runs as ever.
    """
    calls: dict[nn.Module, list[Tensor]] = {}
    name = model.config._attn_implementation or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = partial(_observe, calls, original)  # this object's own entry, over the library's
    try:
        yield calls
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _observe(
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
    """As any attention function: (B,H,T,P), and keys and values of fewer heads."""
    per_group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.float() @ key.float().repeat_interleave(per_group, dim=1).transpose(2, 3) * scale
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:  # a window, say
        keep = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        scores = scores.masked_fill(~keep[..., : scores.shape[-1]], -torch.inf)
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    calls.setdefault(module, []).append(weights)
    if original is not None:
        output: tuple = original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output
    mixed = weights.to(value.dtype) @ value.repeat_interleave(per_group, dim=1)  # eager is the models' own default
    return mixed.transpose(1, 2), weights


def _numpy(shares: Tensor) -> Shares:
    found: Shares = shares.detach().double().cpu().numpy()
    return found


def segment_spans(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[Span, ...]:
    """(start, stop) in tokens of every `key:value` line of a KV-retrieval document, as `encode` counts them.

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
        raise ProbeError("documents", document.task, "Structural scores need the lines of kv_retrieval.")
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
    """The columns of `STRUCTURAL` for every head of these mixers: each (N,), a number a document.

    `statistics.bootstrap_mean` makes intervals of them. Prompts are run one by one, to the query of the last question.

    Args:
        branch: of the spliced attention heads, those that are there, instead of the mixers' own.

    Raises:
        ProbeError: no documents, or of another task than kv_retrieval.
    """
    if not documents:
        raise ProbeError("documents", 0, "Give at least one.")
    found: dict[HeadId, dict[str, list[float]]] = {}
    for document in documents:
        batch = encode([document], tokenizer, until_answer=True)
        segments, gold = segment_spans(document, tokenizer), document.questions[-1].gold
        run = _run(model, batch, specs, branch)
        for spec in specs:
            columns = _scores(run, spec, segments, gold)
            for i, head in enumerate(run.heads(spec)):
                own = found.setdefault(HeadId(spec.layer, head, spec.letter), {name: [] for name in STRUCTURAL})
                for name in STRUCTURAL:
                    own[name].append(float(columns[name][i]))
    return {head: {name: np.asarray(values) for name, values in own.items()} for head, own in found.items()}


def _scores(run: _Run, spec: MixerSpec, segments: Sequence[Span], gold: int) -> dict[str, Shares]:
    """By column, (H,) of one prompt."""
    heads = run.heads(spec)
    if not heads:
        return {}
    ends = [stop - 1 for _, stop in segments]
    matrix_HTT, constant_HTT = run.shares(spec, heads)[0], run.shares(spec, heads, constant=True)[0]
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
    """What every head of these mixers reads at the query of each document, for `report.page.write_page`.

    Args:
        full: heads whose whole matrix is kept, T^2 numbers each.
        branch: of the spliced attention heads, those that are there, instead of the mixers' own.

    Raises:
        PlanError: a head of `full` that is not among those.
    """
    return PromptAttention(tuple(_prompt(model, tokenizer, d, specs, list(map(str, full)), branch) for d in documents))


def _prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    specs: Sequence[MixerSpec],
    full: Sequence[str],
    branch: bool,
) -> Prompt:
    batch = encode([document], tokenizer, until_answer=True)
    run = _run(model, batch, specs, branch)
    rows: dict[str, Shares] = {}
    matrices: dict[str, Shares] = {}
    for spec in (s for s in specs if run.heads(s)):
        shares_HTT = run.shares(spec, run.heads(spec))[0]
        for head, own_TT in zip(run.heads(spec), shares_HTT, strict=True):
            name = str(HeadId(spec.layer, head, spec.letter))
            rows[name] = _numpy(own_TT[-1])
            if name in full:
                matrices[name] = _numpy(own_TT)
    lacking = [name for name in full if name not in matrices]
    if lacking:
        raise PlanError("full", lacking[0], "It is not a head of these mixers.")
    places = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
    marks = {name: int(position[0, -1]) for name, position in places.items() if int(position[0, -1]) >= 0}
    tokens = tuple(tokenizer.decode([i]) for i in batch.input_ids[0].tolist())
    return Prompt(tokens, marks, rows, matrices)
