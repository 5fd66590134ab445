"""What of a teacher corresponds to what of a student, on tiny models of the real formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RecipeError
from surgery.models.lookup import block_of, family_of
from surgery.recipe import Align
from surgery.train.losses import attention_mse_loss, hidden_loss
from surgery.train.teacher import Teacher, check_tokenizers, layer_outputs
from surgery.types import Graft
from tests.support.pico import (
    FAMILY_NAMES,
    HIDDEN,
    pico_base,
    pico_family,
    pico_hybrid,
    pico_site,
    pico_tokenizer,
    tokens,
)
from tests.support.samples import several_questions

TRANSFORMERS = ("llama", "qwen2", "gpt_neox")
V = 1024


def batch_of(side: Any = "right") -> EncodedBatch:
    return encode(several_questions(2), pico_tokenizer(), side)


def graft(layer: int, heads: tuple[int, ...], **more: Any) -> Graft:
    site = family_of(pico_base().config).mixers(pico_base().config)[layer]
    reads = ("segment_end",) * len(heads)
    return Graft(site, heads, more.pop("mode", "add"), more.pop("init", "ssm"), reads, **more)  # type: ignore[arg-type]


def teacher_of(name: str = "llama", needs: tuple[str, ...] = ("teacher.logits",), **more: Any) -> Teacher:
    """A teacher of `pico_base`, which has 3 layers of 4 heads."""
    student = more.pop("student", pico_base(vocab_size=V).config)
    grafts, align = more.pop("grafts", ()), more.pop("align", None)
    model = pico_family(name, **{"vocab_size": V, **more})
    return Teacher(model, pico_tokenizer(), student, grafts, align, needs)


def changed(tokenizer: PreTrainedTokenizerFast, **more: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of its own, from the same file."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), **more)


def test_tokenizers_that_differ_in_padding_alone_agree() -> None:
    check_tokenizers(pico_tokenizer(), changed(pico_tokenizer(), pad_token=pico_tokenizer().pad_token))
    assert changed(pico_tokenizer()).pad_token is None
    check_tokenizers(pico_tokenizer(), changed(pico_tokenizer()))


def test_another_token_is_named() -> None:
    other = changed(pico_tokenizer())
    other.add_tokens(["zebra"])
    with pytest.raises(RecipeError, match=r"train\.teacher\.model.*'zebra' is no token in the base's, token \d+"):
        check_tokenizers(pico_tokenizer(), other)


def test_other_ids_are_refused() -> None:
    data = json.loads(pico_tokenizer().backend_tokenizer.to_str())
    names = [token for token, i in data["model"]["vocab"].items() if i in (500, 501)]
    vocabulary = data["model"]["vocab"]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)))
    with pytest.raises(RecipeError, match="token 500 in the base's, token 501 in the teacher's"):
        check_tokenizers(pico_tokenizer(), other)


def test_other_special_tokens_are_refused() -> None:
    other = changed(pico_tokenizer())
    other.add_special_tokens({"additional_special_tokens": [pico_tokenizer().convert_ids_to_tokens(600)]})
    with pytest.raises(RecipeError, match="special token in one"):
        check_tokenizers(pico_tokenizer(), other)


def test_another_way_of_cutting_text_is_refused() -> None:
    other = changed(pico_tokenizer())
    other.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(RecipeError, match="tokens in the base's"):
        check_tokenizers(pico_tokenizer(), other)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_layer_outputs_are_what_the_blocks_put_out(name: str) -> None:
    """The last one is what the head reads. Families list them in two ways."""
    model = pico_family(name)
    check_layer_outputs(model)


def test_layer_outputs_of_hybrids() -> None:
    check_layer_outputs(pico_hybrid([pico_site(1)]))
    check_layer_outputs(pico_hybrid([pico_site(2)], n_groups=2))


def check_layer_outputs(model: PreTrainedModel) -> None:
    count, spec = model.config.num_hidden_layers, family_of(model.config).mixers(model.config)[0]
    seen: dict[int, Tensor] = {}

    def keep(layer: int, output: Any) -> None:
        seen[layer] = output[0] if isinstance(output, tuple) else output

    for i in range(count - 1):
        block_of(model, i, spec).register_forward_hook(lambda module, args, output, i=i: keep(i, output))
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: keep(count - 1, args[0]))
    with torch.no_grad():
        output = model(tokens(2, 9), use_cache=False, output_hidden_states=True)
    found = layer_outputs(model.config, output.hidden_states, range(count))
    assert len(seen) == count
    for layer in range(count):
        assert torch.equal(found[layer], seen[layer]), layer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_matrices_are_those_of_output_attentions(name: str, side: str) -> None:
    """The naive way: the model's own `output_attentions` under eager attention, which keeps every layer's."""
    batch = batch_of(side)
    grafts = (graft(0, (1, 3)), graft(2, (0,)))
    teacher = teacher_of(name, ("teacher.full_attention",), grafts=grafts, align=Align(heads={"L0H3": "L1H2"}))
    found = teacher.outputs(batch, {"teacher.full_attention"})
    assert found.logits is None and not found.hidden_states and found.full_attention
    naive = pico_family(name, vocab_size=V)
    naive.set_attn_implementation("eager")
    with torch.no_grad():
        every = naive(batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True).attentions
    expected = [torch.stack([every[0][:, 1], every[1][:, 2]], 1), every[2][:, :1]]
    for mine, theirs in zip(found.full_attention, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(found.full_attention[0][:, 0], found.full_attention[0][:, 1])


@pytest.mark.parametrize("offset", [-3, 2])
def test_an_offset_moves_what_the_teacher_attends_to(offset: int) -> None:
    """By so many tokens, no further than the first or the attending one; no attention is lost."""
    batch, grafts, needs = batch_of(), (graft(0, (1, 3)),), ("teacher.attention",)
    plain, moved = (
        teacher_of("llama", needs, grafts=grafts, align=Align(offsets=given)).outputs(batch, needs).full_attention
        for given in ({}, {"L0H3": offset})
    )
    assert plain and moved
    assert torch.equal(moved[0][:, 0], plain[0][:, 0])
    expected, T = torch.zeros_like(plain[0][:, 1]), plain[0].shape[-1]
    for t in range(T):
        for s in range(t + 1):
            expected[:, t, min(max(s + offset, 0), t)] += plain[0][:, 1, t, s]
    torch.testing.assert_close(moved[0][:, 1], expected)
    torch.testing.assert_close(moved[0].sum(-1), plain[0].sum(-1))


def test_the_attention_implementation_is_as_before_even_after_an_error() -> None:
    teacher = teacher_of("llama", ("teacher.full_attention",), grafts=(graft(0, (1,)),))
    before = teacher.model.config._attn_implementation
    assert before != "eager"
    teacher.outputs(batch_of(), {"teacher.full_attention"})
    assert teacher.model.config._attn_implementation == before
    broken = batch_of()
    broken.input_ids[0, 0] = V
    with pytest.raises(IndexError):
        teacher.outputs(broken, {"teacher.full_attention"})
    assert teacher.model.config._attn_implementation == before
    assert not any(m._forward_hooks for m in teacher.model.modules() if type(m).__name__ == "LlamaAttention")


def names_of(teacher: Teacher) -> list[list[str]]:
    return [[str(head) for head in heads] for heads in teacher.heads]


def test_heads_are_the_named_the_donors_or_the_namesakes_by_layer() -> None:
    copied = graft(1, (0, 2), init="teacher", donors=("L2H3", "L2H1"))
    whole = graft(2, (0, 1, 2, 3), mode="replace", init="teacher", unit="layer", donors=("L1",))
    plain = graft(0, (3,))
    teacher = teacher_of(
        "llama", ("teacher.full_attention",), grafts=(copied, whole, plain), align=Align(heads={"L1H2": "L0H0"})
    )
    assert names_of(teacher) == [["L0H3"], ["L2H3", "L0H0"], ["L1H0", "L1H1", "L1H2", "L1H3"]]


def test_heads_that_one_of_the_models_does_not_have_are_refused() -> None:
    asked: dict[str, Any] = {"needs": ("teacher.full_attention",), "grafts": (graft(0, (3,)),)}
    with pytest.raises(RecipeError, match="L0H3: L0H9"):
        teacher_of(align=Align(heads={"L0H3": "L0H9"}), **asked)
    with pytest.raises(RecipeError, match="L2H3"):
        teacher_of("llama", ("teacher.full_attention",), grafts=(graft(2, (3,)),), num_hidden_layers=2)
    with pytest.raises(RecipeError, match=r"L1H1.*No head of that name"):
        teacher_of(align=Align(heads={"L1H1": "L0H0"}), **asked)
    with pytest.raises(RecipeError, match=r"align\.offsets: L1H1.*No head of that name"):
        teacher_of(align=Align(offsets={"L1H1": -1}), **asked)
    with pytest.raises(RecipeError, match=r"train\.teacher\.model: mamba2"):
        teacher_of("mamba2", **asked)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_logits_are_the_models_own(name: str) -> None:
    teacher, batch = teacher_of(name), batch_of()
    found = teacher.outputs(batch, {"answers", "teacher.logits"})
    with torch.no_grad():
        expected = teacher.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert found.logits is not None and torch.equal(found.logits, expected)
    assert not found.full_attention and not found.hidden_states
    assert not any(p.requires_grad for p in teacher.model.parameters())


def test_a_vocabulary_padded_otherwise_is_cut_or_filled() -> None:
    batch = batch_of()
    plain = teacher_of().outputs(batch, {"teacher.logits"}).logits
    wide = teacher_of(student=pico_base(vocab_size=V + 8).config).outputs(batch, {"teacher.logits"}).logits
    narrow = teacher_of(vocab_size=V + 8, student=pico_base(vocab_size=V).config)
    assert plain is not None and wide is not None
    assert torch.equal(wide[..., :V], plain)
    assert torch.equal(wide[..., V:], plain.amin(-1, keepdim=True).expand(-1, -1, 8))
    found = narrow.outputs(batch, {"teacher.logits"}).logits
    assert found is not None and found.shape[-1] == V
    whole = narrow.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert torch.equal(found, whole[..., :V])


def test_a_vocabulary_without_some_of_the_tokens_is_refused() -> None:
    used = max(pico_tokenizer().get_vocab().values()) + 1
    with pytest.raises(RecipeError, match=f"tokenizer {used}"):
        teacher_of(vocab_size=used - 1)
    with pytest.raises(RecipeError, match="every token"):
        teacher_of(student=pico_base(vocab_size=used - 1).config)


def test_nothing_runs_where_nothing_is_wanted() -> None:
    teacher = teacher_of()
    teacher.model.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    found = teacher.outputs(batch_of(), {"answers", "model.attention"})
    assert found.logits is None and not found.full_attention and not found.hidden_states


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [(3, 3, [0, 1, 2]), (3, 6, [1, 3, 5]), (6, 3, [0, 0, 0, 1, 1, 2]), (4, 1, [0, 0, 0, 0])],
)
def test_layers_correspond_in_proportion(mine: int, theirs: int, expected: list[int]) -> None:
    student = pico_base(vocab_size=V, layers=mine).config
    found = teacher_of("llama", ("teacher.hidden_states",), student=student, num_hidden_layers=theirs).layers
    assert list(found) == list(range(mine))
    assert list(found.values()) == expected


def test_named_layers_are_the_only_ones() -> None:
    assert teacher_of("llama", ("teacher.hidden_states",), align=Align(layers={0: 1, 2: 2})).layers == {0: 1, 2: 2}


@pytest.mark.parametrize("layers", [{0: 3}, {3: 0}, {2: 1}, {1: 2}])
def test_layers_that_do_not_correspond_are_refused(layers: dict[int, int]) -> None:
    with pytest.raises(RecipeError, match=r"train\.align\.layers"):
        teacher_of("llama", ("teacher.hidden_states",), align=Align(layers=layers))


def test_streams_of_another_width_are_refused() -> None:
    with pytest.raises(RecipeError, match=f"hidden_size 64, but the base has {HIDDEN}"):
        teacher_of("llama", ("teacher.hidden_states",), hidden_size=64)


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_its_streams() -> None:
    batch, model = batch_of(), pico_family("llama", vocab_size=V)
    teacher = Teacher(model, pico_tokenizer(), model.config, needs=("teacher.hidden_states",))
    found = teacher.outputs(batch, {"teacher.hidden_states"}).hidden_states
    output = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    assert found is not None and len(found) == 3
    assert float(hidden_loss(teacher.student_hidden(output.hidden_states), found, batch)) == 0


def test_both_alignments_reach_the_spliced_head() -> None:
    batch, student = batch_of(), pico_hybrid([pico_site(1, [2])], vocab_size=V)
    teacher = teacher_of(
        "llama", ("teacher.full_attention", "teacher.hidden_states"), student=student.config, grafts=(graft(1, (2,)),)
    )
    target = teacher.outputs(batch, {"teacher.full_attention", "teacher.hidden_states"})
    assert target.full_attention and target.hidden_states
    every = torch.arange(batch.input_ids.shape[1]).expand(len(batch), -1)
    student.requires_grad_(False)
    branch = student.backbone.layers[1].mixer.attention.requires_grad_(True)
    output = student(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        splice_queries=every,
        output_hidden_states=True,
    )
    rows = output.splice_attentions
    assert rows[0].shape == target.full_attention[0].shape
    query = branch.qkv_proj.weight
    for loss in (
        attention_mse_loss(rows, target.full_attention, batch),
        hidden_loss(teacher.student_hidden(output.hidden_states), target.hidden_states, batch),
    ):
        (gradient,) = torch.autograd.grad(loss, query, retain_graph=True)
        assert float(gradient.abs().max()) > 0
