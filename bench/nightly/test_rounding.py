"""The plugin that rounds otherwise tells the same computation from another one of the same result."""

import pytest
import torch

from tests.support.rounding import OtherRounding, assert_close_in_ulps, assert_same_bits


def rows_and_weight() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 64, generator=generator), torch.randn(64, 32, generator=generator)


def test_the_same_computation_has_the_same_bits() -> None:
    rows, weight = rows_and_weight()
    with OtherRounding():
        assert_same_bits(rows @ weight, rows @ weight)
        assert_same_bits((rows @ weight).softmax(-1), (rows @ weight).softmax(-1))


def test_another_shape_has_other_bits_and_the_same_numbers() -> None:
    rows, weight = rows_and_weight()
    with OtherRounding():
        whole, halves = rows @ weight, torch.cat([rows[:4] @ weight, rows[4:] @ weight])
    with pytest.raises(AssertionError):
        assert_same_bits(whole, halves)
    assert_close_in_ulps(whole, halves)


def test_numbers_that_differ_are_not_close() -> None:
    rows, weight = rows_and_weight()
    product = rows @ weight
    with pytest.raises(AssertionError):
        assert_close_in_ulps(product + 1e-4 * product.abs().max(), product)
