"""The model that is learned from. Owns: whether it can teach, and what corresponds to what in the two models.

Must never know: losses, optimizers, data. The teacher runs on the same token ids, so both tokenizers have to agree.

Shape legend: B documents, T tokens, V the student's vocabulary, H spliced heads of a layer, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.errors import PlanError, RecipeError
from surgery.hybrid.packing import positions_of
from surgery.models.donors import donor_mixers
from surgery.models.lookup import family_of
from surgery.recipe import Align
from surgery.train.packing import apart
from surgery.types import Graft, HeadId, MixerSpec

_FIELD = "train.teacher.model"
_SAMPLE = "The value of 'key12' is 3.5%.\n\n\tNaïve: {'a': [1, 20, 300]}"  # texts are to be cut the same way
# Of these, transformers' models list every block's output; those of all others begin with the embeddings.
_WITHOUT_EMBEDDINGS = ("mamba2", "mamba2attn", "mamba", "falcon_mamba")


def check_tokenizers(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Both have the same tokens under the same ids, the same of them special, and cut text the same way.

    Which of the special tokens ends a text, or pads, may differ: the student's tokenizer makes all documents.

    Raises:
        RecipeError: they do not; it names a token.
    """
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine != theirs:
        token = min(mine.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]
        raise _unlike(f"{token!r} is {_id(mine, token)} in the base's, {_id(theirs, token)} in the teacher's")
    special = [{i for i, token in x.added_tokens_decoder.items() if token.special} for x in (student, teacher)]
    if special[0] != special[1]:
        odd = student.convert_ids_to_tokens(min(special[0] ^ special[1]))
        raise _unlike(f"{odd!r} is a special token in one of them alone")
    cut = [x(_SAMPLE, add_special_tokens=False)["input_ids"] for x in (student, teacher)]
    if cut[0] != cut[1]:
        raise _unlike(f"{_SAMPLE!r} has {len(cut[0])} tokens in the base's, {len(cut[1])} in the teacher's, others too")


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "no token"


def _unlike(what: str) -> RecipeError:
    return RecipeError(_FIELD, f"its tokenizer is not the base's: {what}", "Name a teacher with the base's tokenizer.")


def layer_outputs(config: PreTrainedConfig, hidden_states: Sequence[Tensor], layers: Collection[int]) -> list[Tensor]:
    """The outputs of these layers, each (B,T,D), from what a model returns with `output_hidden_states`.

    The last layer's is taken behind the final norm: many models return no other.
    """
    before = 0 if family_of(config).name in _WITHOUT_EMBEDDINGS else 1
    last = config.num_hidden_layers - 1
    return [hidden_states[-1] if layer == last else hidden_states[layer + before] for layer in layers]


@dataclass(frozen=True)
class TeacherOutput:
    """What was asked for; None for the rest.

    Attributes:
        logits: (B,T,V).
        mixing: for each graft, (B,H,T,T): the attention of the heads that correspond to its heads.
        hidden: for each layer that is compared, (B,T,D).
    """

    logits: Tensor | None = None
    mixing: list[Tensor] | None = None
    hidden: list[Tensor] | None = None


class Teacher:
    """A frozen model, and what of it corresponds to what of the student.

    Args:
        model: frozen and put into eval mode here.
        tokenizer: the student's.
        student: the student's config.
        objectives: those that are asked for at any time; what they need is checked here, before training.

    Attributes:
        heads: with `reading` or `mixing`: for each graft, by layer, the teacher's head for each of its heads.
        layers: with `hidden`: the teacher's layer for each of the student's that is compared.

    Raises:
        RecipeError: tokens, heads, layers or widths that the teacher does not have; a head or layer in `align` that the
            student does not have; matrices of a model without attention that is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        student: PreTrainedConfig,
        grafts: Sequence[Graft] = (),
        align: Align | None = None,
        objectives: Collection[str] = ("distil",),
    ) -> None:
        self.model, self.student = model.eval().requires_grad_(False), student
        align = align or Align()
        used = max(tokenizer.get_vocab().values()) + 1
        if used > min(model.config.vocab_size, student.vocab_size):
            found = f"{model.config.vocab_size} tokens; the base has {student.vocab_size}, the tokenizer {used}"
            raise RecipeError(_FIELD, found, "Both models have to know every token of the tokenizer.")
        self.heads: tuple[tuple[HeadId, ...], ...] = ()
        self.layers: dict[int, int] = {}
        if {"reading", "mixing"} & set(objectives):
            self._mixers, self.heads = _heads(model.config, grafts, align)
            self._offsets = _offsets(grafts, align)
        if "hidden" in objectives:
            self.layers = _layers(model.config, student, align)

    @torch.no_grad()
    def outputs(self, batch: EncodedBatch, want: Collection[str]) -> TeacherOutput:
        """What these objectives compare with; of `distil`, `reading`, `mixing` and `hidden`.

        Matrices take the eager attention in all layers, T^2 numbers a head, one layer at a time; those of the heads
        that are asked for are kept.
        """
        needs_logits, needs_hidden = (name in want for name in ("distil", "hidden"))
        needs_rows = bool({"reading", "mixing"} & set(want))
        if not (needs_logits or needs_rows or needs_hidden):
            return TeacherOutput()
        model = self.model if needs_logits else self.model.base_model
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            if needs_rows:
                stack.enter_context(_eager(self.model))
                stack.enter_context(self._watched(seen))
            stack.enter_context(apart(self.model, batch.documents))
            output = model(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
                output_hidden_states=needs_hidden,
            )
        return TeacherOutput(
            _fitted(output.logits, self.student.vocab_size) if needs_logits else None,
            self._matrices(seen, batch.documents) if needs_rows else None,
            layer_outputs(self.model.config, output.hidden_states, self.layers.values()) if needs_hidden else None,
        )

    def student_hidden(self, hidden_states: Sequence[Tensor]) -> list[Tensor]:
        """The student's side of `hidden`: the same layers' outputs, from its `output_hidden_states`."""
        return layer_outputs(self.student, hidden_states, self.layers)

    def _matrices(self, seen: dict[int, Tensor], documents: Tensor | None) -> list[Tensor]:
        """For each graft, (B,H,T,T) of the heads that correspond to its heads."""
        return [
            torch.stack(
                [_moved(seen[h.layer][:, h.head], by, documents) for h, by in zip(heads, offsets, strict=True)], 1
            )
            for heads, offsets in zip(self.heads, self._offsets, strict=True)
        ]

    @contextmanager
    def _watched(self, seen: dict[int, Tensor]) -> Iterator[None]:
        """Keeps the attention matrices (B,all heads,T,T) of the layers that heads are taken from."""
        wanted = {head.layer for heads in self.heads for head in heads}
        with ExitStack() as stack:
            for layer in wanted:

                def keep(module: nn.Module, args: Any, output: Any, layer: int = layer) -> None:
                    seen[layer] = output[1]

                mixer = self.model.get_submodule(self._mixers[layer].path)
                stack.callback(mixer.register_forward_hook(keep).remove)
            yield
        assert seen.keys() == wanted, "an attention layer was passed by"


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """The one implementation that returns its matrices."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _fitted(logits_BTV: Tensor, width: int) -> Tensor:
    """As wide as the student's. Models pad their vocabulary to different sizes, with tokens that no tokenizer makes.

    What the teacher does not have is as unlikely as the unlikeliest that it has: at -inf the reverse divergence would
    be infinite.
    """
    missing = width - logits_BTV.shape[-1]
    if missing <= 0:
        return logits_BTV[..., :width]
    least = logits_BTV.amin(-1, keepdim=True).expand(*logits_BTV.shape[:-1], missing)
    return torch.cat([logits_BTV, least], dim=-1)


def _heads(
    teacher: PreTrainedConfig, grafts: Sequence[Graft], align: Align
) -> tuple[dict[int, MixerSpec], tuple[tuple[HeadId, ...], ...]]:
    """The teacher's attention by layer, and its head for every spliced one: as named, its donor, or its namesake."""
    try:
        mixers = {spec.layer: spec for spec in donor_mixers(teacher)}
    except PlanError as error:
        raise RecipeError(_FIELD, error.value, error.hint) from None
    known = {head for spec in mixers.values() for head in spec.heads}
    found: list[tuple[HeadId, ...]] = []
    named = dict(align.heads)
    for graft in sorted(grafts, key=lambda graft: graft.site.layer):
        names = [f"{graft.site.name}{head}" for head in graft.heads]
        heads = [HeadId.parse(named.pop(n, own)) for n, own in zip(names, _donors(graft, names), strict=True)]
        for name, head in zip(names, heads, strict=True):
            if head not in known:
                hint = f"The teacher has no such head; it has {len(mixers)} layers of {mixers[0].num_heads}."
                raise RecipeError("train.align.heads", f"{name}: {head}", hint)
        found.append(tuple(heads))
    if named:
        raise RecipeError("train.align.heads", next(iter(named)), "No head of that name is spliced.")
    return mixers, tuple(found)


def _offsets(grafts: Sequence[Graft], align: Align) -> list[list[int]]:
    """By graft and head, as `_heads`."""
    named = dict(align.offsets)
    ordered = sorted(grafts, key=lambda graft: graft.site.layer)
    found = [[named.pop(f"{graft.site.name}{head}", 0) for head in graft.heads] for graft in ordered]
    if named:
        raise RecipeError("train.align.offsets", next(iter(named)), "No head of that name is spliced.")
    return found


def _moved(rows_BTT: Tensor, offset: int, documents: Tensor | None = None) -> Tensor:
    """Attention to a token becomes attention to the one `offset` behind it, the first of its document or the attending
    one at most.
    """
    if not offset:
        return rows_BTT
    place_T = torch.arange(rows_BTT.shape[-1], device=rows_BTT.device)
    first = place_T.new_zeros(()) if documents is None else (place_T - positions_of(documents))[..., None]
    moved = torch.minimum(torch.maximum(place_T + offset, first), place_T[:, None])
    return torch.zeros_like(rows_BTT).scatter_add(-1, moved.expand(rows_BTT.shape), rows_BTT)


def _donors(graft: Graft, names: Sequence[str]) -> Sequence[str]:
    """Where the graft's heads were copied from; their own names if they were not."""
    if graft.unit == "layer":
        return [f"{graft.donors[0]}H{head}" for head in graft.heads]
    return graft.donors or names


def _layers(teacher: PreTrainedConfig, student: PreTrainedConfig, align: Align) -> dict[int, int]:
    """The teacher's layer for each of the student's, in proportion where none is named: the last for the last."""
    if teacher.hidden_size != student.hidden_size:
        hint = "`hidden` compares streams of the same width: give it weight 0, or name another teacher."
        raise RecipeError(_FIELD, f"{teacher.hidden_size} wide, and the base {student.hidden_size}", hint)
    mine, theirs = student.num_hidden_layers, teacher.num_hidden_layers
    if not align.layers:
        return {i: max(0, (i + 1) * theirs // mine - 1) for i in range(mine)}
    for layer, other in align.layers.items():
        if not (0 <= layer < mine and 0 <= other < theirs):
            hint = f"The base's layers are 0 to {mine - 1}, the teacher's 0 to {theirs - 1}."
            raise RecipeError("train.align.layers", f"{layer}: {other}", hint)
        if (layer == mine - 1) != (other == theirs - 1):
            hint = "The last layer's output is known behind the final norm alone: compare last with last, or neither."
            raise RecipeError("train.align.layers", f"{layer}: {other}", hint)
    return dict(align.layers)
