"""Sums of outer products, their mixing, and the error measured by them."""

import pytest
import torch

from clover_local.quant.hessian import CHUNK_ROWS, add_products, outer, relative_error, shrink


@pytest.mark.parametrize("rows", [0, 1, 37, CHUNK_ROWS + 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_outer_is_the_weighted_sum_of_products(rows: int, weighted: bool) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 7).bfloat16()
    weights = torch.rand(rows) if weighted else None
    wide = x.double()
    scaled = wide if weights is None else wide * weights.double()[:, None]
    total = outer(x, weights=weights)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), wide.T @ scaled, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 29, CHUNK_ROWS + 3])
def test_products_of_two_kinds_of_rows_are_added_to_what_is_there(rows: int) -> None:
    torch.manual_seed(rows)
    a, b, weights = torch.randn(rows, 3), torch.randn(rows, 7), torch.rand(rows)
    total = torch.ones(3, 7)
    add_products(total, a, b, weights=weights)
    expected = 1 + (a.double() * weights[:, None]).T @ b.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)


def test_weight_2_counts_as_two_rows() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 6)
    twice = outer(torch.cat([x, x[2:3]]))
    torch.testing.assert_close(outer(x, weights=torch.tensor([1.0, 1, 2, 1, 1])), twice)


def test_shrink_goes_from_the_pooled_mean_to_the_own() -> None:
    torch.manual_seed(2)
    xs = [torch.randn(rows, 9) * (1 + rows) ** 0.1 for rows in (0, 3, 40_000)]
    own = torch.stack([outer(x) for x in xs])
    rows = torch.tensor([float(len(x)) for x in xs])
    pooled = outer(torch.cat(xs))
    mixed = shrink(own, rows=rows, pooled=pooled, pooled_rows=float(rows.sum()), prior_rows=64.0)
    mean = pooled / rows.sum()
    torch.testing.assert_close(mixed[0], mean)
    torch.testing.assert_close(mixed[1], (own[1] + 64 * mean) / 67)
    torch.testing.assert_close(mixed[2], own[2] / 40_000, rtol=1e-2, atol=1e-2)
    assert torch.equal(own[1], outer(xs[1])), "the sums are read only"


@pytest.mark.parametrize(("pooled_rows", "prior_rows"), [(0.0, 64.0), (10.0, 0.0)])
def test_shrink_refuses_where_nothing_was_seen(pooled_rows: float, prior_rows: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        shrink(
            torch.zeros(2, 3, 3),
            rows=torch.zeros(2),
            pooled=torch.zeros(3, 3),
            pooled_rows=pooled_rows,
            prior_rows=prior_rows,
        )


def test_relative_error_is_that_of_the_outputs() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(2, 50, 12), torch.randn(2, 5, 12)
    approximation = weight + 0.1 * torch.randn_like(weight)
    lost = ((weight - approximation) @ x.mT).square().sum((1, 2))
    whole = (weight @ x.mT).square().sum((1, 2))
    hessian = torch.stack([outer(one) for one in x])
    torch.testing.assert_close(relative_error(weight, approximation, hessian), lost / whole)
    one = relative_error(weight[0].bfloat16(), weight[0].bfloat16(), hessian[0])
    assert float(one) == 0.0


def test_relative_error_of_nothing_is_0_and_no_size_overflows() -> None:
    hessian = torch.eye(4) * 1e30
    assert float(relative_error(torch.zeros(3, 4), torch.zeros(3, 4), hessian)) == 0.0
    assert float(relative_error(torch.ones(3, 4), torch.zeros(3, 4), torch.zeros(4, 4))) == 0.0
    large = torch.full((3, 4), 1e25)
    torch.testing.assert_close(relative_error(large, large / 2, hessian), torch.tensor(0.25))
    small = torch.full((3, 4), 1e-30)
    torch.testing.assert_close(relative_error(small, small / 2, hessian / 1e38), torch.tensor(0.25))
