"""Several documents a row: each gives what it gives alone, whatever the others are.

The kernels are stand-ins in plain torch (`tests/support/kernels.py`): a GPU has not run this. Our scans run without
them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.hybrid.modeling_hybrid import (
    SplicePass,
    SpliceRows,
    Unpacked,
    marked_documents,
    packed_masks,
    positions_of,
)
from surgery.models.torch_scans import torch_scans
from tests.support.battery import trained
from tests.support.cases import each
from tests.support.kernels import with_kernels
from tests.support.pico import PAD, SPLICED_FAMILIES, pico_hybrid, pico_site, random_site, tokens
from tests.unit.splice.test_inserted import trained as inserted

FAMILIES = ("mamba2", "mamba2attn", "bamba", "granite", "zamba2", "nemotron_h")
EXPERTS = ("granite", "nemotron_h", "inserted")  # torch multiplies theirs in fp32 at most
LENGTHS = ((9, 7, 5), (11, 1, 6))  # by row; the second has padding at its end
T = 21
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 0}
every_family = each("name", FAMILIES)
every_path = each("fuses", [True, False])


def hybrid(name: str) -> Any:
    return inserted("pair") if name == "inserted" else trained(name)


def documents(seed: int = 0) -> list[list[Tensor]]:
    return [[tokens(1, n, seed + 10 * r + i)[0] for i, n in enumerate(row)] for r, row in enumerate(LENGTHS)]


def packed(texts: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """(2,T) tokens, and the index of the document that each belongs to; padding is one more."""
    ids, index = torch.full((2, T), PAD), torch.empty(2, T, dtype=torch.long)
    for row, parts in enumerate(texts):
        filled = torch.cat(parts)
        ids[row, : len(filled)] = filled
        sizes = torch.tensor([*map(len, parts), T - len(filled)])
        index[row] = torch.arange(len(sizes)).repeat_interleave(sizes)
    return ids, index


def places() -> list[tuple[int, slice]]:
    """Of every document, as `documents` lists them."""
    return [(row, slice(sum(sizes[:i]), sum(sizes[: i + 1]))) for row, sizes in enumerate(LENGTHS) for i in range(3)]


def exact(model: Any, name: str = "mamba2") -> Any:
    """A copy in fp64, where its family can be."""
    copied = copy.deepcopy(model)
    return copied if name in EXPERTS else copied.double()


def close(name: str = "mamba2") -> dict[str, Any]:
    """Norms, and eager attention's softmax, are computed in fp32 in any dtype; Zamba2's logits reach 40."""
    return {"atol": 2e-5 if name in (*EXPERTS, "zamba2") else 1e-5, "rtol": 0}


@torch.no_grad()
def logits(model: Any, texts: list[list[Tensor]], **more: Any) -> list[Tensor]:
    """Of every document, packed."""
    ids, index = packed(texts)
    found = model(ids, seq_idx=index, use_cache=False, **more).logits
    return [found[row, span] for row, span in places()]


@torch.no_grad()
def alone(model: Any, texts: list[list[Tensor]]) -> list[Tensor]:
    return [model(part[None], use_cache=False).logits[0] for row in texts for part in row]


def assert_apart(model: Any, name: str = "mamba2") -> None:
    """Each document's logits are its own, and stay as they are bit for bit when another document is another."""
    texts = documents()
    found = logits(model, texts)
    for ours, theirs in zip(found, alone(model, texts), strict=True):
        torch.testing.assert_close(ours, theirs, **close(name))
    for changed in range(3):
        others = [[*row] for row in texts]
        for row, parts in enumerate(documents(seed=50)):
            others[row][changed] = parts[changed]
        for place, (ours, theirs) in enumerate(zip(found, logits(model, others), strict=True)):
            if place % 3 != changed:
                torch.testing.assert_close(ours, theirs, atol=2e-5 if name in EXPERTS else 0, rtol=0)
            else:
                assert not torch.allclose(ours, theirs, atol=1e-3)


class TestPlaces:
    def test_documents_are_counted_from_zero_where_the_index_changes(self) -> None:
        index = torch.tensor([[4, 4, 4, 2, 2, 4], [0, 0, 1, 1, 1, 1]])
        found = marked_documents({}, index, torch.empty(2, 6, 0), None)
        assert found.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
        assert found.dtype == torch.int32, "kernels want that"
        assert positions_of(found).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]

    @pytest.mark.parametrize(
        ("positions", "mask", "expected"),
        [
            ([0, 1, 2, 0, 1, 0], None, [0, 0, 0, 1, 1, 2]),
            ([2, 3, 4, 2, 3, 2], [1] * 6, [0, 0, 0, 1, 1, 2]),
            ([0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]),  # padding at the end
            ([0, 1, 2, 9, 10, 30], None, None),  # positions that skip
            ([1, 1, 1, 0, 1, 2], [0, 0, 0, 1, 1, 1], None),  # padding at the left, as `generate` counts
            ([0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 1, 1], None),
        ],
    )
    def test_positions_that_start_again_mark_documents(self, positions: list, mask: list | None, expected: Any) -> None:
        mask = None if mask is None else torch.tensor([mask])
        given = {"position_ids": torch.tensor([positions])}, None, torch.empty(1, 6, 0)
        found = marked_documents(*given, mask)
        assert (found if found is None else found[0].tolist()) == expected
        masks = {"linear_attention": mask}  # made by `generate`, which packs none
        if expected is None:
            assert marked_documents(*given, masks) is None
        else:
            with pytest.raises(ValueError, match=r"^attention_mask: .* needs to be \(B,T\), or None"):
                marked_documents(*given, masks)


class TestBranch:
    @each("implementation", ["eager", "sdpa"])
    @each("site", [pico_site(0, [1, 3]), random_site(0)])
    def test_a_document_sees_itself(self, site: dict, implementation: str) -> None:
        """Output and rows, without any scan."""
        model = exact(pico_hybrid([site], attn_implementation=implementation)).requires_grad_(False)
        branch, index = model.backbone.layers[0].mixer.attention, packed(documents())[1]
        u_BTD = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        masks = packed_masks(model.config, u_BTD, positions_of(index))
        rows = SpliceRows(torch.arange(T).expand(2, T), index)
        found = branch(u_BTD, None, SplicePass(causal=masks["full_attention"], rows=rows, documents=index))[0]
        (attended,) = rows.take()
        for row, span in places():
            length, part = span.stop - span.start, u_BTD[row : row + 1, span]
            causal = packed_masks(model.config, part, torch.arange(length)[None])["full_attention"]
            single = SpliceRows(torch.arange(length)[None])
            expected = branch(part, None, SplicePass(causal=causal, rows=single))[0]
            torch.testing.assert_close(found[row, span], expected[0], atol=1e-6, rtol=0)
            torch.testing.assert_close(attended[row, :, span, span], single.take()[0][0], atol=1e-6, rtol=0)
            outside = attended[row, :, span].clone()
            outside[..., span] = 0
            assert not outside.any()

    @each("init", ["ssm", "random", "teacher"])
    @each("mode", ["add", "replace"])
    def test_every_kind_of_head(self, init: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with_kernels(monkeypatch)
        model = exact(trained("mamba2", mode=mode, init=init)).train()
        assert_apart(model)


class TestModels:
    @every_family
    @every_path
    def test_documents_are_apart(self, name: str, fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        with_kernels(monkeypatch, fuses=fuses)
        assert_apart(exact(trained(name), name).train(), name)

    @every_family
    def test_documents_are_apart_in_our_scans(self, name: str) -> None:
        model = exact(trained(name), name).train()
        with torch_scans(model):
            assert_apart(model, name)


def ways(ids: Tensor, index: Tensor) -> dict[str, dict[str, Any]]:
    """Each way in which callers mark the documents of rows; padding is one more."""
    positions, starts = positions_of(index), index.new_tensor(range(len(index) * T + 1))
    flat = F.pad((index + 10 * torch.arange(len(index))[:, None]).flatten(), (1, 1), value=-1)
    borders = starts[flat.diff() != 0].int()
    lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 11, "max_length_k": 11}
    return {
        "index": {"seq_idx": index},
        "positions": {"position_ids": positions},
        "lengths": lengths,
        "all": {"seq_idx": index, "position_ids": positions, **lengths},
        "positions and padding": {"position_ids": positions, "attention_mask": (ids != PAD).long()},
    }


@each("name", [*SPLICED_FAMILIES, "inserted"])
class TestWithoutKernels:
    """What callers of flash attention and `DataCollatorWithFlattening` pass, where no scan keeps documents apart."""

    def test_documents_are_apart_however_they_are_marked(self, name: str) -> None:
        model, (ids, index) = exact(hybrid(name), name), packed(documents())
        expected = alone(model, documents())
        with torch.no_grad():
            for way, given in ways(ids, index).items():
                found = model(ids, **given, output_hidden_states=True)
                assert found.cache is None and found.hidden_states[0].shape[:2] == ids.shape, way
                for (row, span), theirs in zip(places(), expected, strict=True):
                    torch.testing.assert_close(found.logits[row, span], theirs, **close(name), msg=way)

    def test_gradients_and_loss_are_those_of_the_documents(self, name: str) -> None:
        model = copy.deepcopy(hybrid(name)).train().requires_grad_(True)
        ids = torch.cat(documents()[0])[None]
        positions = torch.cat([torch.arange(n) for n in LENGTHS[0]])[None]
        model(
            ids, position_ids=positions, labels=ids.where(positions > 0, -100), num_items_in_batch=T - 3
        ).loss.backward()
        packed_together = [p.grad for p in model.parameters()]
        model.zero_grad()
        for part in documents()[0]:
            model(part[None], labels=part[None], num_items_in_batch=T - 3).loss.backward()
        for ours, parameter in zip(packed_together, model.parameters(), strict=True):
            if parameter.grad is not None:
                torch.testing.assert_close(ours, parameter.grad, atol=1e-4 * max(1, parameter.grad.abs().max()), rtol=0)

    def test_left_padding_and_decoding_mark_none(self, name: str) -> None:
        model, ids = hybrid(name), tokens(2, 12)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            for positions in ((mask.cumsum(1) - 1).where(mask.bool(), 1), (mask.cumsum(1) - 1).clamp(min=0)):
                first = model(ids[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9], use_cache=True)
                found = [first.logits]
                for t in range(9, 12):
                    given = {"position_ids": positions[:, t : t + 1], "cache": first.cache, "use_cache": True}
                    found.append(model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], **given).logits)
                torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected, **CLOSE)

    def test_what_contradicts_or_is_unknown_is_refused(self, name: str) -> None:
        model, (ids, index) = hybrid(name), packed(documents())
        borders = ways(ids, index)["lengths"]
        for given, error, message in (
            ({"seq_idx": index, "use_cache": True}, ValueError, "without a cache"),
            ({"seq_idx": index[:1]}, ValueError, "one index a token"),
            ({"seq_idx": index, "position_ids": torch.arange(T)[None]}, ValueError, "start at 0 in every document"),
            ({"seq_idx": torch.zeros_like(index), **borders}, ValueError, "other documents than seq_idx"),
            ({"cu_seq_lens_q": borders["cu_seq_lens_q"][:-1]}, ValueError, f"go from 0 to .* {2 * T}"),
            ({"seq_idx": index, "attention_mask": torch.ones(2, 1, T, T)}, ValueError, r"attention_mask: .* \(B,T\)"),
            ({"max_length_q": 7}, ValueError, "max_length_q: it says nothing without cu_seq_lens_q"),
            ({"seq_idx": index, "output_attentions": True}, ValueError, "output_attentions: not with packed documents"),
            ({"token_type_ids": index}, TypeError, "unexpected keyword argument 'token_type_ids'"),
        ):
            for part in (model, model.base_model):
                with pytest.raises(error, match=message):
                    part(ids, **given)


class TestMarks:
    def test_zeros_at_the_end_cost_one_row_each(self) -> None:
        """Positions of padding are often 0: each is a document of one token, and none is as long as the longest."""
        documents_BT = torch.cat([torch.zeros(64), torch.arange(1, 193)]).int()[None].expand(2, -1)
        unpacked = Unpacked(documents_BT)
        assert [tuple(place_NL.shape) for place_NL, _ in unpacked.groups] == [(2, 64), (2 * 192, 1)]
        x_BTD = torch.randn(2, 256, 3)
        parts = [{"x": unpacked.split(x_BTD, place_NL)} for place_NL, _ in unpacked.groups]
        assert torch.equal(unpacked.joined(parts)["x"], x_BTD)

    def test_a_mask_that_numbers_documents_is_refused(self) -> None:
        model, mask = trained("mamba2"), torch.tensor([[1] * 9 + [2] * 12])
        for bad in (mask, 2 * mask, -mask):
            with pytest.raises(ValueError, match=r"^attention_mask: values other than 0 and 1\. Mark .* by seq_idx"):
                model(tokens(1, T), attention_mask=bad, use_cache=False)
        for good in ((mask > 1).long(), (mask > 1), (mask > 1).float()):
            model(tokens(1, T), attention_mask=good, use_cache=False)

    def test_lengths_may_be_a_list(self) -> None:
        model, ids = trained("mamba2"), tokens(1, T)
        with torch.no_grad():
            expected = model(ids, cu_seq_lens_q=torch.tensor([0, 9, T]), use_cache=False).logits
            assert torch.equal(model(ids, cu_seq_lens_q=[0, 9, T], use_cache=False).logits, expected)
        for bad in ([0, 9], [[0, T]], ["a"], 7):
            with pytest.raises(ValueError, match=r"^cu_seq_lens_q: "):
                model(ids, cu_seq_lens_q=bad, use_cache=False)
