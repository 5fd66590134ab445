"""Cut the state of an SSM: measure the contribution of its channels, and keep those that contribute most.

Retrieval-Aware Distillation (arXiv 2602.11374) shrinks the state of a hybrid from 64 to 8 channels, since its attention
does the retrieval.

Shape legend: B prompts, T tokens, H heads of P, G groups, N channels of the state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import PlanError, ProbeError, fitting
from surgery.models.hooks import hooked, store_output
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.runtime import requires_grad
from surgery.probes.documents import Document
from surgery.types import MixerSpec

Channels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StateCut:
    """Channels of the state to keep.

    Attributes:
        state_size: number of channels to keep.
        kept: by `MixerSpec.name`, the channels of each group, in ascending order.
    """

    state_size: int
    kept: Mapping[str, Channels]

    def weights(self, model: PreTrainedModel) -> dict[int, Tensor]:
        """Return copies of the weights that depend on the state's width, cut to the channels to keep.

        These are the rows of B and C in `in_proj`, and their channels of the short convolution. The copies are by the
        `data_ptr` of the weights and biases in the model.

        Raises:
            PlanError: the cut was chosen for another model.
        """
        cut: dict[int, Tensor] = {}
        for spec in _ssm_mixers(model):
            kept, structure, mixer = self._of(spec), structure_of(spec), mixer_of(model, spec)
            groups = [structure.weight_slices(spec, g * spec.num_heads // spec.num_groups) for g in range(len(kept))]
            in_proj = structure.in_proj(mixer)
            assert in_proj is not None
            rows = ([g.key for g in groups], [g.query for g in groups])
            cut |= _cut_rows(in_proj, rows, kept)
            rows = ([g.conv_key for g in groups], [g.conv_query for g in groups])
            cut |= _cut_rows(mixer.conv1d, rows, kept)
        return cut

    def _of(self, spec: MixerSpec) -> Channels:
        kept = self.kept.get(spec.name, ())
        fits = [len(set(channels)) == self.state_size and max(channels) < spec.state_size for channels in kept]
        if len(fits) != spec.num_groups or not all(fits):
            hint = f"Choose {self.state_size} of {spec.state_size} channels for each of {spec.num_groups} groups."
            raise PlanError("state.json kept", f"{spec.name} {[list(channels) for channels in kept]}", hint)
        return kept


def _cut_rows(module: nn.Module, blocks: Sequence[Sequence[slice | None]], kept: Channels) -> dict[int, Tensor]:
    """Copy the weight and bias of a module, without the rows of the channels to drop. Returns them by `data_ptr`.

    `blocks` are the rows of B and those of C, for each group.
    """
    weights = list(module.parameters(recurse=False))
    keep = torch.ones(len(weights[0]), dtype=torch.bool)
    for block in blocks:
        for rows, channels in zip(block, kept, strict=True):
            assert rows is not None
            keep[rows] = torch.isin(torch.arange(rows.stop - rows.start), torch.tensor(channels))
    return {weight.data_ptr(): weight.detach()[keep.to(weight.device)].clone() for weight in weights}


def choose_channels(contributions: Mapping[str, Tensor], state_size: int) -> StateCut:
    """Choose the channels with the largest contributions, in each mixer and group. Ties keep the lower number.

    `contributions` are those of `state_contributions`.
    """
    kept = {}
    for name, values_GN in contributions.items():
        best = values_GN.argsort(dim=1, descending=True, stable=True)[:, :state_size].sort(dim=1).values
        kept[name] = tuple(map(tuple, best.tolist()))
    return StateCut(state_size, kept)


def cut_to_json(cut: StateCut, contributions: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the content of state.json."""
    return {
        "state_size": cut.state_size,
        "kept": {name: [list(channels) for channels in kept] for name, kept in cut.kept.items()},
        "contributions": {name: values.tolist() for name, values in contributions.items()},
    }


def cut_from_json(data: Mapping[str, Any]) -> StateCut:
    """Parse the content of state.json. Raises KeyError, TypeError or ValueError where it is malformed."""
    kept = {
        name: tuple(tuple(sorted(map(int, channels))) for channels in groups) for name, groups in data["kept"].items()
    }
    if any(channels and channels[0] < 0 for groups in kept.values() for channels in groups):
        raise ValueError("kept: a channel is negative")
    return StateCut(int(data["state_size"]), kept)


def state_contributions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> dict[str, Tensor]:
    """Measure how much each channel of the state contributes to the answers of some prompts.

    The output of a head's scan is a sum over the channels of the state, `y_t = sum_n C_tn h_tn + D x_t`. The
    contribution of channel n of a group is, to first order, how much the log-odds m of a prompt's answer change if its
    term is removed at every token:

        e_n = sum over the group's heads and over t of C_tn (h_tn . dm/dy_t),    contribution = sqrt(mean of e_n^2)

    over the prompts. m is the sum of log(p / (1 - p)) over the answer's tokens. The energy of the term alone misleads:
    the largest term can be one that no answer depends on.

    Args:
        documents: prompts with one question each.
        batch_size: prompts in a batch, which needs the memory of a forward and a backward pass.

    Returns:
        By `MixerSpec.name`, (G,N) in logits, float64 on the CPU.

    Raises:
        ProbeError: there are no documents.
    """
    if not documents:
        raise ProbeError("documents", 0, "Pass at least one document.")
    specs = _ssm_mixers(model)
    squares = {s.name: torch.zeros(s.num_groups, s.state_size, dtype=torch.float64) for s in specs}
    with requires_grad(False, model), fitting("locate.batch_size", batch_size):
        for start in range(0, len(documents), batch_size):
            chunk = documents[start : start + batch_size]
            batch = encode(chunk, tokenizer, padding_side="left").to(model.device)
            for name, effects_BGN in _effects(model, specs, batch).items():
                squares[name] += effects_BGN.double().square().sum(0).cpu()
    return {name: (total / len(documents)).sqrt() for name, total in squares.items()}


def _effects(model: PreTrainedModel, specs: Sequence[MixerSpec], batch: EncodedBatch) -> dict[str, Tensor]:
    """(B,G,N) first-order effect of each channel on the log-odds of each prompt's answer, by mixer."""
    projected: dict[str, Tensor] = {}
    scans: dict[str, Tensor] = {}

    def watch(name: str, args: tuple) -> None:
        scans[name] = args[0] if args[0].requires_grad else args[0].requires_grad_()

    with torch.enable_grad():
        with hooked(model, specs) as hooks:
            for spec in specs:
                structure, mixer, name = structure_of(spec), mixer_of(model, spec), spec.name
                in_proj = structure.in_proj(mixer)
                assert in_proj is not None
                hooks.after(spec.layer, f"{name} in_proj", in_proj, partial(store_output, projected, name))
                hooks.before(spec.layer, f"{name} scan", structure.scan_reader(mixer), partial(watch, name))
            output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        log_odds = _log_odds(output.logits[:, :-1][batch.answers[:, 1:]], batch.input_ids[:, 1:][batch.answers[:, 1:]])
        gradients = torch.autograd.grad(log_odds.sum(), [scans[spec.name] for spec in specs])
    mask_BT = batch.attention_mask
    return {
        spec.name: _channel_effects(model, spec, projected[spec.name], gradient.detach(), mask_BT)
        for spec, gradient in zip(specs, gradients, strict=True)
    }


def _log_odds(logits_MV: Tensor, ids_M: Tensor) -> Tensor:
    """(M,) log(p / (1 - p)) of each token: its logit minus the log of the sum over all others. It does not saturate."""
    wide = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return wide.gather(1, ids_M[:, None])[:, 0] - wide.scatter(1, ids_M[:, None], -torch.inf).logsumexp(1)


@torch.no_grad()
def _channel_effects(
    model: PreTrainedModel, spec: MixerSpec, projected: Tensor, gradient_BTI: Tensor, mask_BT: Tensor
) -> Tensor:
    """(B,G,N): `sum over t, s of C_tn W_ts B_sn`, with W_ts the sum over the group's heads of decay * (x_s . dm/dy_t).

    Args:
        gradient_BTI: dm/dy, or the gradient at y times the gate.
    """
    structure, mixer = structure_of(spec), mixer_of(model, spec)
    streams = structure.streams(mixer, spec, projected)
    wide = torch.promote_types(projected.dtype, torch.float32)
    if streams.gate is not None:
        gradient_BTI = gradient_BTI * streams.gate
    gradient_BTHP = gradient_BTI.to(wide).unflatten(-1, (spec.num_heads, spec.head_dim))
    x_BTHP = (streams.x * mask_BT[..., None, None]).to(wide)  # streams are valid at real tokens only
    key, query = streams.key.to(wide), streams.query.to(wide)
    # With a product C.B of 1, hidden attention is the decay times the step.
    one = replace(
        streams,
        x=x_BTHP,
        key=torch.full_like(key, 1 / spec.state_size),
        query=torch.ones_like(query),
        step=streams.step.to(wide),
    )
    decay_BHTS = structure.hidden_attention(mixer, spec, one)
    weights_BHTS = decay_BHTS * torch.einsum("bthp,bshp->bhts", gradient_BTHP, x_BTHP)
    weights_BGTS = weights_BHTS.unflatten(1, (spec.num_groups, -1)).sum(2)
    return (query * torch.einsum("bgts,bsgn->btgn", weights_BGTS, key)).sum(1)


def _ssm_mixers(model: PreTrainedModel) -> list[MixerSpec]:
    return [spec for spec in family_of(model.config).mixers(model.config) if spec.is_ssm]
