"""Factors of damped Hessians, each with the damping that it needs."""

import torch

from clover_local.quant.factor import factor


def test_factor_is_that_of_the_scaled_and_damped_hessian() -> None:
    x = torch.randn(2, 40, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hessian = x.mT @ x * torch.tensor([1.0, 1e6], dtype=torch.float64)[:, None, None]
    result = factor(hessian, 0.02)
    assert torch.equal(result.upper, result.upper.triu())
    mean = hessian.diagonal(dim1=1, dim2=2).mean(-1)
    torch.testing.assert_close(result.mean, mean)
    expected = hessian / mean[:, None, None] + 0.02 * torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(result.upper @ result.upper.mT, expected)
    assert result.damp.tolist() == [torch.tensor(0.02).item()] * 2
    assert not result.dead.any()


def test_damping_is_raised_for_those_that_need_it_only() -> None:
    bad = torch.eye(4)
    bad[0, 1] = bad[1, 0] = 1.5
    result = factor(torch.stack([torch.eye(4), bad]), 0.01)
    torch.testing.assert_close(result.damp, torch.tensor([0.01, 1.0]))
    assert bool(torch.isfinite(result.upper).all())


def test_dead_inputs_stand_apart() -> None:
    hessian = torch.diag(torch.tensor([3.0, 0.0, 1.0]))
    result = factor(hessian[None], 0.01)
    assert result.dead.tolist() == [[False, True, False]]
    assert result.mean.tolist() == [2.0]
    torch.testing.assert_close(result.diagonal, torch.tensor([[1.5, 1.0, 0.5]]))
