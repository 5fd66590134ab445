"""What of a teacher corresponds to what of a student, on tiny models of the real formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from transformers import PreTrainedTokenizerFast

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RecipeError
from surgery.models.lookup import block_of, family_of
from surgery.recipe import Align
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

V = 1024
FULL, HIDDEN_STATES = "teacher.full_attention", "teacher.hidden_states"


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


def changed(text: str | None = None, **more: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of its own, from the same file or a changed one."""
    text = text or pico_tokenizer().backend_tokenizer.to_str()
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **more)


def test_tokenizers_that_differ_in_more_than_padding_are_refused() -> None:
    assert changed().pad_token is None
    check_tokenizers(pico_tokenizer(), changed())
    added, special, lower = changed(), changed(), changed()
    added.add_tokens(["zebra"])
    special.add_special_tokens({"additional_special_tokens": [pico_tokenizer().convert_ids_to_tokens(600)]})
    lower.backend_tokenizer.normalizer = Lowercase()
    data = json.loads(pico_tokenizer().backend_tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    a, b = (token for token, i in vocabulary.items() if i in (500, 501))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    for other, says in (
        (added, r"train\.teacher\.model.*'zebra' is no token in the base's, token \d+"),
        (changed(json.dumps(data)), "token 500 in the base's, token 501 in the teacher's"),
        (special, "special token in one"),
        (lower, "tokens in the base's"),
    ):
        with pytest.raises(RecipeError, match=says):
            check_tokenizers(pico_tokenizer(), other)


def test_layer_outputs_are_what_the_blocks_put_out() -> None:
    """The last one is what the head reads. Families list them in two ways."""
    for model in (*map(pico_family, FAMILY_NAMES), pico_hybrid([pico_site(1)])):
        count, spec = model.config.num_hidden_layers, family_of(model.config).mixers(model.config)[0]
        seen = list[Any]()
        for i in range(count - 1):
            block_of(model, i, spec).register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        model.get_output_embeddings().register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args))
        with torch.no_grad():
            output = model(tokens(2, 9), use_cache=False, output_hidden_states=True)
        found = layer_outputs(model.config, output.hidden_states, range(count))
        expected = [output[0] if isinstance(output, tuple) else output for output in seen]
        assert len(expected) == count and all(torch.equal(found[i], expected[i]) for i in range(count)), (
            model.config.model_type
        )


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_the_matrices_are_those_of_output_attentions(name: str) -> None:
    """The naive way: the model's own `output_attentions` under eager attention, which keeps every layer's."""
    naive = pico_family(name, vocab_size=V)
    naive.set_attn_implementation("eager")
    grafts = (graft(0, (1, 3)), graft(2, (0,)))
    teacher = teacher_of(name, (FULL,), grafts=grafts, align=Align(heads={"L0H3": "L1H2"}))
    for side in ("left", "right"):
        batch = batch_of(side)
        found = teacher.outputs(batch, {FULL})
        assert found.logits is None and not found.hidden_states and found.full_attention
        with torch.no_grad():
            every = naive(batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True).attentions
        expected = [torch.stack([every[0][:, 1], every[1][:, 2]], 1), every[2][:, :1]]
        for mine, theirs in zip(found.full_attention, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert not torch.allclose(found.full_attention[0][:, 0], found.full_attention[0][:, 1])


def test_an_offset_moves_what_the_teacher_attends_to() -> None:
    """By so many tokens, no further than the first or the attending one; no attention is lost."""
    batch, needs = batch_of(), (FULL,)
    made: dict[str, Any] = {"needs": needs, "grafts": (graft(0, (1, 3)),)}
    (plain,) = teacher_of(**made).outputs(batch, needs).full_attention
    for offset in (-3, 2):
        (moved,) = teacher_of(**made, align=Align(offsets={"L0H3": offset})).outputs(batch, needs).full_attention
        assert torch.equal(moved[:, 0], plain[:, 0])
        expected = torch.zeros_like(plain[:, 1])
        for t in range(plain.shape[-1]):
            for s in range(t + 1):
                expected[:, t, min(max(s + offset, 0), t)] += plain[:, 1, t, s]
        torch.testing.assert_close(moved[:, 1], expected)


def test_heads_are_the_named_the_donors_or_the_namesakes_by_layer() -> None:
    copied = graft(1, (0, 2), init="teacher", donors=("L2H3", "L2H1"))
    whole = graft(2, (0, 1, 2, 3), mode="replace", init="teacher", unit="layer", donors=("L1",))
    grafts, align = (copied, whole, graft(0, (3,))), Align(heads={"L1H2": "L0H0"})
    found = [[str(head) for head in heads] for heads in teacher_of("llama", (FULL,), grafts=grafts, align=align).heads]
    assert found == [["L0H3"], ["L2H3", "L0H0"], ["L1H0", "L1H1", "L1H2", "L1H3"]]


def test_layers_correspond_in_proportion_or_as_named() -> None:
    for mine, theirs, expected in ((3, 3, [0, 1, 2]), (3, 6, [1, 3, 5]), (6, 3, [0, 0, 0, 1, 1, 2]), (4, 1, [0] * 4)):
        student = pico_base(vocab_size=V, layers=mine).config
        found = teacher_of("llama", (HIDDEN_STATES,), student=student, num_hidden_layers=theirs).layers
        assert list(found) == list(range(mine)) and list(found.values()) == expected
    assert teacher_of("llama", (HIDDEN_STATES,), align=Align(layers={0: 1, 2: 2})).layers == {0: 1, 2: 2}


def test_what_one_of_the_models_does_not_have_is_refused() -> None:
    used = max(pico_tokenizer().get_vocab().values()) + 1
    attends: dict[str, Any] = {"needs": (FULL,), "grafts": (graft(0, (3,)),)}
    hidden: dict[str, Any] = {"needs": (HIDDEN_STATES,)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**attends, "align": Align(heads={"L0H3": "L0H9"})}, "L0H3: L0H9"),
        ({"needs": (FULL,), "grafts": (graft(2, (3,)),), "num_hidden_layers": 2}, "L2H3"),
        ({**attends, "align": Align(heads={"L1H1": "L0H0"})}, "L1H1.*No head of that name"),
        ({**attends, "align": Align(offsets={"L1H1": -1})}, r"align\.offsets: L1H1.*No head of that name"),
        ({**attends, "name": "mamba2"}, r"train\.teacher\.model: mamba2"),
        ({"vocab_size": used - 1}, f"tokenizer {used}"),
        ({"student": pico_base(vocab_size=used - 1).config}, "every token"),
        ({**hidden, "hidden_size": 64}, f"hidden_size 64, but the base has {HIDDEN}"),
        *(({**hidden, "align": Align(layers={a: b})}, r"align\.layers") for a, b in ((0, 3), (3, 0), (2, 1), (1, 2))),
    ]
    for given, says in cases:
        with pytest.raises(RecipeError, match=says):
            teacher_of(**given)


def test_logits_are_the_models_own_with_the_students_vocabulary() -> None:
    batch = batch_of()
    for name in ("llama", "mamba2"):
        teacher = teacher_of(name)
        found = teacher.outputs(batch, {"answers", "teacher.logits"})
        with torch.no_grad():
            expected = teacher.model(batch.input_ids, attention_mask=batch.attention_mask).logits
        assert torch.equal(found.logits, expected) and not found.full_attention and not found.hidden_states
        assert not any(p.requires_grad for p in teacher.model.parameters())
    plain = teacher_of().outputs(batch, {"teacher.logits"}).logits
    wide = teacher_of(student=pico_base(vocab_size=V + 8).config).outputs(batch, {"teacher.logits"}).logits
    assert torch.equal(wide[..., :V], plain)
    assert torch.equal(wide[..., V:], plain.amin(-1, keepdim=True).expand(-1, -1, 8))
    narrow = teacher_of(vocab_size=V + 8)
    whole = narrow.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    assert torch.equal(narrow.outputs(batch, {"teacher.logits"}).logits, whole[..., :V])
    narrow.model.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    assert narrow.outputs(batch, {"answers", "model.attention"}).logits is None
