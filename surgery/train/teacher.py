"""Check a teacher model, align its heads and layers with the student's, and run it.

The teacher runs on the student's token ids, so both must have the same tokenizer.

Shape legend: B documents, T tokens, V the student's vocabulary, H spliced heads of a layer, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.data.offsets import SAMPLE_TEXT, tokenized
from surgery.errors import PlanError, RecipeError
from surgery.hybrid.modeling_hybrid import positions_of
from surgery.models.donors import donor_mixers
from surgery.models.lookup import family_of
from surgery.recipe import Align
from surgery.train.losses import rows_at_queries
from surgery.train.objectives import Outputs
from surgery.train.packing import separate_documents
from surgery.types import Graft, HeadId, MixerSpec

_FIELD = "train.teacher.model"
_ATTENTION = frozenset({"teacher.attention", "teacher.full_attention"})
# Models of these families return the output of every block as hidden states. All others put the embeddings first.
_WITHOUT_EMBEDDINGS = ("mamba2", "mamba2attn", "mamba", "falcon_mamba")


class Teacher:
    """A frozen model with its heads and layers aligned to the student's.

    Args:
        model: put into eval mode and frozen.
        tokenizer: the student's.
        student: the student's config.
        grafts: the spliced heads of the student.
        align: the recipe's section `align`: heads, offsets and layers.
        needs: all needs of the objectives, such as `teacher.logits`. They are checked before training.

    Attributes:
        heads: for each graft, ordered by layer, the teacher's head for each spliced head. Set if attention is needed.
        layers: student's layer -> teacher's layer, for the compared layers. Set if hidden states are needed.

    Raises:
        RecipeError: the teacher lacks tokens, heads or layers that are needed, has another width, or its attention is
            unknown; or `align` names a head or layer that the student lacks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        student: PreTrainedConfig,
        grafts: Sequence[Graft] = (),
        align: Align | None = None,
        needs: Collection[str] = ("teacher.logits",),
    ) -> None:
        self.model, self.student = model.eval().requires_grad_(False), student
        align = align or Align()
        check_teacher(model.config, tokenizer, student, align, needs)
        self.heads: tuple[tuple[HeadId, ...], ...] = ()
        self.layers: dict[int, int] = {}
        if _ATTENTION & set(needs):
            ordered = sorted(grafts, key=lambda graft: graft.site.layer)
            self._mixers = _attention_of(model.config)
            self.heads, self._offsets = _aligned_heads(self._mixers, ordered, align), _offsets(ordered, align)
        if "teacher.hidden_states" in needs:
            self.layers = _aligned_layers(model.config, student, align)

    @torch.no_grad()
    def outputs(self, batch: EncodedBatch, needs: Collection[str]) -> Outputs:
        """Run the teacher on a batch, if one of the objectives' needs begins with `teacher.`.

        If attention is needed, all layers use eager attention, with T^2 numbers per head for one layer at a time. Only
        the matrices of aligned heads are kept.
        """
        needs_logits, needs_hidden = (name in needs for name in ("teacher.logits", "teacher.hidden_states"))
        needs_attention = bool(_ATTENTION & set(needs))
        if not (needs_logits or needs_attention or needs_hidden):
            return Outputs()
        model = self.model if needs_logits else self.model.base_model
        matrices: dict[int, Tensor] = {}
        with ExitStack() as stack:
            if needs_attention:
                stack.enter_context(self._recording(matrices))
            stack.enter_context(separate_documents(self.model, batch.documents))
            mask = batch.attention_mask
            output = model(batch.input_ids, attention_mask=mask, use_cache=False, output_hidden_states=needs_hidden)
        full, states = self._aligned(matrices, batch.documents) if needs_attention else [], list[Tensor]()
        if needs_hidden:
            states = layer_outputs(self.model.config, output.hidden_states, self.layers.values())
        return Outputs(
            logits=_resized(output.logits, self.student.vocab_size) if needs_logits else None,
            attention=[rows_at_queries(x, batch) for x in full] if "teacher.attention" in needs else (),
            full_attention=full,
            hidden_states=states,
        )

    @contextmanager
    def _recording(self, matrices: dict[int, Tensor]) -> Iterator[None]:
        """Record the attention matrices (B,all heads,T,T) of the layers that have an aligned head."""
        layers = {head.layer for heads in self.heads for head in heads}
        before = self.model.config._attn_implementation
        with ExitStack() as stack:
            self.model.set_attn_implementation("eager")  # no other one returns its matrices
            stack.callback(self.model.set_attn_implementation, before)
            for layer in layers:

                def record(module: nn.Module, args: Any, output: Any, layer: int = layer) -> None:
                    matrices[layer] = output[1]

                mixer = self.model.get_submodule(self._mixers[layer].path)
                stack.callback(mixer.register_forward_hook(record).remove)
            yield
        assert matrices.keys() == layers, "the hook of an attention layer did not fire"

    def _aligned(self, matrices: dict[int, Tensor], documents: Tensor | None) -> list[Tensor]:
        """Attention matrices of the teacher's aligned heads, (B,H,T,T) for each graft."""
        return [
            torch.stack(
                [_shifted(matrices[h.layer][:, h.head], by, documents) for h, by in zip(*pairs, strict=True)], 1
            )
            for pairs in zip(self.heads, self._offsets, strict=True)
        ]


def check_tokenizers(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Check that both have the same tokens, ids and special tokens, and split text in the same way.

    The choice of end and padding token may differ: all documents are encoded with the student's tokenizer.

    Raises:
        RecipeError: the tokenizers differ. The error names a token.
    """
    vocabulary, other = student.get_vocab(), teacher.get_vocab()
    special = [{i for i, token in x.added_tokens_decoder.items() if token.special} for x in (student, teacher)]
    ids = [tokenized(x, [SAMPLE_TEXT])[0].ids for x in (student, teacher)]
    if vocabulary != other:
        token = min(vocabulary.items() ^ other.items(), key=lambda item: (item[1], item[0]))[0]
        base_id, teacher_id = (f"token {v[token]}" if token in v else "no token" for v in (vocabulary, other))
        difference = f"{token!r} is {base_id} in the base's, {teacher_id} in the teacher's"
    elif special[0] != special[1]:
        odd = student.convert_ids_to_tokens(min(special[0] ^ special[1]))
        difference = f"{odd!r} is a special token in one of them only"
    elif ids[0] != ids[1]:
        difference = f"{SAMPLE_TEXT!r} is {len(ids[0])} tokens in the base's, {len(ids[1])} in the teacher's"
    else:
        return
    value = f"its tokenizer differs from the base's: {difference}"
    raise RecipeError(_FIELD, value, "Set a teacher with the base's tokenizer.")


def check_teacher(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    student: PreTrainedConfig,
    align: Align,
    needs: Collection[str],
) -> None:
    """Check what objectives need of a teacher, except single heads. `student` may be the config of its base.

    Raises:
        RecipeError: the teacher lacks tokens or layers, has another width, or its attention is unknown.
    """
    used = max(tokenizer.get_vocab().values()) + 1
    if used > min(config.vocab_size, student.vocab_size):
        sizes = f"{config.vocab_size} tokens; the base has {student.vocab_size}, the tokenizer {used}"
        raise RecipeError(_FIELD, sizes, "Both models must have an embedding for every token of the tokenizer.")
    if _ATTENTION & set(needs):
        _attention_of(config)
    if "teacher.hidden_states" in needs:
        _aligned_layers(config, student, align)


def _attention_of(teacher: PreTrainedConfig) -> dict[int, MixerSpec]:
    """Attention of the teacher by layer. Raises RecipeError if it is unknown."""
    try:
        return {spec.layer: spec for spec in donor_mixers(teacher)}
    except PlanError as error:
        raise RecipeError(_FIELD, error.value, error.hint) from None


def _aligned_heads(
    mixers: dict[int, MixerSpec], grafts: Sequence[Graft], align: Align
) -> tuple[tuple[HeadId, ...], ...]:
    """Find the teacher's head for every spliced head: the one in `align`, the donor of the splice, or the namesake."""
    known = {head for spec in mixers.values() for head in spec.heads}
    heads_by_graft: list[tuple[HeadId, ...]] = []
    named = dict(align.heads)
    for graft in grafts:
        names = [f"{graft.site.name}{head}" for head in graft.heads]
        donors: Sequence[str] = graft.donors or names
        if graft.unit == "layer":
            donors = [f"{graft.donors[0]}H{head}" for head in graft.heads]
        heads = [HeadId.parse(named.pop(name, donor)) for name, donor in zip(names, donors, strict=True)]
        for name, head in zip(names, heads, strict=True):
            if head not in known:
                hint = f"The teacher has no such head. It has {len(mixers)} layers of {mixers[0].num_heads} heads."
                raise RecipeError("train.align.heads", f"{name}: {head}", hint)
        heads_by_graft.append(tuple(heads))
    if named:
        raise RecipeError("train.align.heads", next(iter(named)), "No head of that name is spliced.")
    return tuple(heads_by_graft)


def _offsets(grafts: Sequence[Graft], align: Align) -> list[list[int]]:
    """Offset of every spliced head in tokens, by graft."""
    named = dict(align.offsets)
    offsets = [[named.pop(f"{graft.site.name}{head}", 0) for head in graft.heads] for graft in grafts]
    if named:
        raise RecipeError("train.align.offsets", next(iter(named)), "No head of that name is spliced.")
    return offsets


def _shifted(rows_BTT: Tensor, offset: int, documents: Tensor | None = None) -> Tensor:
    """Shift attention by `offset` tokens, but not beyond the document's first token or the attending token."""
    if not offset:
        return rows_BTT
    place_T = torch.arange(rows_BTT.shape[-1], device=rows_BTT.device)
    first = place_T.new_zeros(()) if documents is None else (place_T - positions_of(documents))[..., None]
    shifted = torch.minimum(torch.maximum(place_T + offset, first), place_T[:, None])
    return torch.zeros_like(rows_BTT).scatter_add(-1, shifted.expand(rows_BTT.shape), rows_BTT)


def _aligned_layers(teacher: PreTrainedConfig, student: PreTrainedConfig, align: Align) -> dict[int, int]:
    """Map the student's layers to the teacher's: by `align.layers`, otherwise by relative depth, last to last."""
    if teacher.hidden_size != student.hidden_size:
        hint = "hidden_mse needs equal widths. Set its weight to 0, or set another teacher."
        raise RecipeError(_FIELD, f"hidden_size {teacher.hidden_size}, but the base has {student.hidden_size}", hint)
    count, teacher_count = student.num_hidden_layers, teacher.num_hidden_layers
    if not align.layers:
        return {i: max(0, (i + 1) * teacher_count // count - 1) for i in range(count)}
    for layer, other in align.layers.items():
        if not (0 <= layer < count and 0 <= other < teacher_count):
            hint = f"Use layers 0 to {count - 1} of the base and 0 to {teacher_count - 1} of the teacher."
            raise RecipeError("train.align.layers", f"{layer}: {other}", hint)
        if (layer == count - 1) != (other == teacher_count - 1):
            hint = "Only the last layer's output after the final norm is known. Align the last layers with each other."
            raise RecipeError("train.align.layers", f"{layer}: {other}", hint)
    return dict(align.layers)


def layer_outputs(config: PreTrainedConfig, hidden_states: Sequence[Tensor], layers: Collection[int]) -> list[Tensor]:
    """Select the outputs of some layers, (B,T,D) each, from the `hidden_states` that a model returns.

    The last layer's output is taken after the final norm, since many models do not return the one before it.
    """
    offset = 0 if family_of(config).name in _WITHOUT_EMBEDDINGS else 1
    last = config.num_hidden_layers - 1
    return [hidden_states[-1] if layer == last else hidden_states[layer + offset] for layer in layers]


def _resized(logits_BTV: Tensor, width: int) -> Tensor:
    """Truncate or pad the vocabulary to the student's size. Models pad it to different sizes with unused tokens."""
    missing = width - logits_BTV.shape[-1]
    if missing <= 0:
        return logits_BTV[..., :width]
    # Not -inf, with which the reverse divergence would be infinite.
    least = logits_BTV.amin(-1, keepdim=True).expand(*logits_BTV.shape[:-1], missing)
    return torch.cat([logits_BTV, least], dim=-1)
