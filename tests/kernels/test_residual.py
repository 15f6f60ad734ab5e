"""The residual stream: the rows that a pass starts with, and sums with their norm."""

import pytest
import torch

from clover_local.kernels.norms import rms_norm, rotary_angles
from clover_local.kernels.residual import MixedExperts, add_rms_norm, start_pass

EPS = 1e-6


def test_rows_are_embedded_and_have_the_angles_of_their_positions() -> None:
    torch.manual_seed(1)
    embedding = torch.randn(11, 6).bfloat16()
    cos, sin = rotary_angles(torch.arange(20), theta=1e4, rotary_dim=6)
    norm = torch.randn(6)
    ids, length = torch.tensor([10, 0, 0, 7]), torch.tensor([13], dtype=torch.int32)
    started = start_pass(
        ids, embedding=embedding, norm=norm, eps=EPS, length=length, cos=cos, sin=sin
    )
    assert torch.equal(started.hidden_states, embedding[[10, 0, 0, 7]])
    assert torch.equal(started.normed, rms_norm(started.hidden_states, norm, eps=EPS))
    expected = rotary_angles(torch.arange(13, 17), theta=1e4, rotary_dim=6)
    assert torch.equal(started.cos, expected[0])
    assert torch.equal(started.sin, expected[1])


def test_rows_behind_the_tables_have_their_last_row() -> None:
    table = torch.arange(5.0)[:, None]
    started = start_pass(
        torch.zeros(4, dtype=torch.int64),
        embedding=torch.ones(1, 3),
        norm=torch.zeros(3),
        eps=EPS,
        length=torch.tensor([3], dtype=torch.int32),
        cos=table,
        sin=-table,
    )
    assert started.cos.flatten().tolist() == [3, 4, 4, 4]
    assert started.sin.flatten().tolist() == [-3, -4, -4, -4]


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
