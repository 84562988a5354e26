"""Packed weights: the same numbers as the plain product, whichever copy of the weight a product reads."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from replicas.models.linear import MAX_FEW_ROWS, Linear, Rows
from replicas.models.narrow import NarrowWeights, narrow_kernel_exists

needs_narrow = pytest.mark.skipif(
    not narrow_kernel_exists(),
    reason="this CPU or torch has no float16 kernel for float32 products",
)


def stored(
    *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 0.02, seed: int = 0
) -> torch.Tensor:
    """Numbers that fit in ``dtype``, as float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).normal_(0, std, generator=generator).to(dtype).float()


def inputs(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def assert_product(
    linear: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
):
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact = exact + bias.double()
    # A sum of n products in float32 is off by a few units of the last place of the sum of their sizes.
    size = x.double().abs() @ weight.double().abs().T
    error = (linear(x).double() - exact).abs()
    bound = 8 * 2.0**-24 * (size + (0 if bias is None else bias.double().abs()))
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("rows", list(Rows))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 40), (40, 96), (33, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_float32(
    rows: Rows, dtype: torch.dtype, out_features: int, in_features: int, with_bias: bool
) -> None:
    weight = stored(out_features, in_features, dtype=dtype)
    bias = stored(out_features, seed=1, std=1.0) if with_bias else None
    linear = Linear(weight.clone(), bias, rows=rows)
    for n in (1, 2, 8, MAX_FEW_ROWS, MAX_FEW_ROWS + 1, 40):
        assert_product(linear, inputs(n, in_features), weight, bias)
    assert linear(torch.empty(0, in_features)).shape == (0, out_features)
    assert torch.equal(linear.weight, weight)


@needs_narrow
@pytest.mark.parametrize("exponent", [-100, -30, -1, 0, 14, 30, 100])
def test_a_narrow_weight_holds_bfloat16_of_any_size(exponent: int) -> None:
    weight = stored(24, 64, std=1.0) * 2.0**exponent
    narrow = NarrowWeights.of(weight[None])
    assert narrow is not None
    assert torch.equal(narrow.weights[0], weight)
    assert_product(narrow.product, inputs(5, 64), weight, None)


@needs_narrow
def test_numbers_far_below_the_largest_are_held_as_promised() -> None:
    """As outliers make it: the largest number is 2^20 times the usual one and more."""
    weight = stored(24, 64, std=2.0**-24)
    weight[3, 5] = 1.0
    narrow = NarrowWeights.of(weight[None])
    assert narrow is not None
    error = (narrow.weights[0] - weight).abs()
    assert float(error.max()) <= 2.0**-40
    assert torch.equal(narrow.weights[0][weight.abs() >= 2.0**-29], weight[weight.abs() >= 2.0**-29])
    assert float(error.max()) > 0, "or the bound is not tested"


@needs_narrow
def test_what_does_not_fit_is_left_alone() -> None:
    whole = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    assert NarrowWeights.of(whole[None]) is None
    almost = stored(24, 64)
    almost[23, 63] += 2.0**-22
    assert NarrowWeights.of(almost[None]) is None
    for value in (math.nan, math.inf):
        broken = stored(24, 64)
        broken[20, 3] = value
        assert NarrowWeights.of(broken[None]) is None
    assert NarrowWeights.of(torch.zeros(1, 4, 4)) is None
    assert NarrowWeights.of(torch.full((1, 4, 4), 2.0**-140)) is None, "the scale back would be infinite"
    assert NarrowWeights.of(stored(1, 8, 8).bfloat16()) is None
    assert torch.equal(Linear(torch.zeros(4, 4), rows=Rows.ANY)(inputs(2, 4)), torch.zeros(2, 4))


@needs_narrow
def test_copies_are_kept_for_the_rows_that_come() -> None:
    weight = stored(32, 16)
    few, many = (inputs(n, 16) for n in (MAX_FEW_ROWS, MAX_FEW_ROWS + 1))
    narrow = NarrowWeights.of(weight[None])
    assert narrow is not None
    wide = Linear(weight, rows=Rows.MANY)
    both, head = Linear(weight, rows=Rows.ANY), Linear(weight, rows=Rows.FEW)
    assert torch.equal(both(few), narrow.product(few))
    assert torch.equal(both(many), wide(many))
    assert torch.equal(head(many), narrow.product(many))


@needs_narrow
@pytest.mark.parametrize("shape", [(5, 24, 16), (5, 16, 24)])
@pytest.mark.parametrize("counts", [[3, 0, 1, 7, 2], [0, 0, 0, 0, 4], [1, 0, 0, 0, 0], [0] * 5])
def test_each_row_goes_through_its_layer(shape: tuple[int, int, int], counts: list[int]) -> None:
    weights = stored(*shape)
    weights[2] *= 64
    narrow = NarrowWeights.of(weights)
    assert narrow is not None
    assert torch.equal(narrow.weights, weights)
    x = inputs(sum(counts), shape[2])
    products = narrow.products(x, counts)
    assert products.shape == (sum(counts), shape[1])
    for weight, part, product in zip(weights, x.split(counts), products.split(counts), strict=True):
        assert torch.allclose(product, part @ weight.T, rtol=0, atol=1e-5)
