"""The residual sum and its norm, of a tensor and of experts that are not added up yet."""

import pytest
import torch

from clover_local.kernels.norms import rms_norm
from clover_local.kernels.residual import MixedExperts, add_rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_the_rounded_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, update = torch.randn(2, 3, 17).to(dtype)
    weight = torch.randn(17)
    total, normed = add_rms_norm(x, update, weight=weight, eps=EPS)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, rms_norm(x + update, weight, eps=EPS))


def test_experts_are_added_in_order_and_the_shared_one_last() -> None:
    # In float32, 1e8 + 1 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1: the order decides.
    results = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0]])[..., None]
    mixed = MixedExperts(
        results, None, shared=torch.tensor([[4.0], [8.0]]), shared_gate=torch.zeros(2, 1)
    )
    assert mixed.sum().tolist() == [[2.0], [5.0]]


def test_places_of_no_expert_are_left_out_whatever_they_hold() -> None:
    torch.manual_seed(2)
    results, shared, gate = torch.randn(4, 3, 9), torch.randn(4, 9), torch.randn(4, 1)
    expert_ids = torch.tensor([[5, 0, 2], [1, -1, 3], [-1, -1, 7], [-1, -1, -1]])
    here = (expert_ids >= 0)[..., None]
    expected = torch.where(here, results, 0.0).sum(1) + shared * gate.sigmoid()
    poisoned = torch.where(here, results, torch.nan)
    got = MixedExperts(poisoned, expert_ids, shared=shared, shared_gate=gate).sum()
    torch.testing.assert_close(got, expected)


def test_sum_of_experts_is_rounded_before_it_is_added() -> None:
    torch.manual_seed(3)
    x, shared = torch.randn(2, 5, 33).bfloat16()
    mixed = MixedExperts(torch.randn(5, 2, 33), None, shared=shared, shared_gate=torch.randn(5, 1))
    weight = torch.randn(33)
    got = add_rms_norm(x, mixed, weight=weight, eps=EPS)
    expected = add_rms_norm(x, mixed.sum().bfloat16(), weight=weight, eps=EPS)
    assert all(map(torch.equal, got, expected))
