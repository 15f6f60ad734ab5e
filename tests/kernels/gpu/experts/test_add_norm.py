"""Experts are added, gated, rounded and normed in one launch as the plain operators do it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.kernels import residual as plain
from clover_local.kernels.gpu import norms
from clover_local.kernels.gpu.experts.add_norm import add_rms_norm
from clover_local.kernels.residual import MixedExperts

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def normal(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def some_experts(
    rows: int, places: int, columns: int, *, device: str, shared_dtype: torch.dtype
) -> MixedExperts:
    """About a third of the places are of no expert and hold NaN; the gate is a router's column."""
    expert_ids = torch.randint(
        -2, 4, (rows, places), generator=torch.Generator().manual_seed(1)
    ).clamp(min=-1)
    results = normal(rows, places, columns, seed=2, device="cpu")
    results[expert_ids < 0] = torch.nan
    return MixedExperts(
        results.to(device),
        expert_ids.to(device),
        shared=normal(rows, columns + 3, seed=3, device=device).to(shared_dtype)[:, 3:],
        shared_gate=normal(rows, 6, seed=4, device=device)[:, 5:],
    )


def check(x: Tensor, mixed: MixedExperts, weight: Tensor) -> None:
    """Sums equal but for the sigmoid's last bit, and norms as close as one rounding allows."""
    got = add_rms_norm(x, mixed, weight=weight, eps=EPS)
    expected = plain.add_rms_norm(x, mixed, weight=weight, eps=EPS)
    step = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]
    for y, wanted in zip(got, expected, strict=True):
        assert y.dtype == x.dtype
        assert y.is_contiguous()
        torch.testing.assert_close(y, wanted, atol=step * 0.2, rtol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "places", "columns"), [(1, 8, 2048), (7, 8, 45), (33, 1, 97), (2, 3, 3001)]
)
def test_experts_are_added_and_normed_as_the_plain_operator_does(
    rows: int, places: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    x = normal(rows, columns, seed=5, device=device).to(dtype)
    weight = normal(columns, seed=6, device=device)
    mixed = some_experts(rows, places, columns, device=device, shared_dtype=dtype)
    check(x, mixed, weight)


@pytest.mark.parametrize("shared_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [1, 8])
def test_without_ids_every_place_counts(
    places: int, shared_dtype: torch.dtype, device: str
) -> None:
    x, weight = normal(7, 72, seed=7, device=device).half(), normal(72, seed=8, device=device)
    mixed = some_experts(7, places, 72, device=device, shared_dtype=shared_dtype)
    results = normal(7, places, 72, seed=9, device=device)
    check(x, replace(mixed, results=results, expert_ids=None), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_bit_for_bit_the_plain_one_where_the_gate_is_exact(
    dtype: torch.dtype, device: str
) -> None:
    x, weight = normal(7, 200, seed=10, device=device).to(dtype), torch.zeros(200, device=device)
    mixed = some_experts(7, 8, 200, device=device, shared_dtype=dtype)
    half = replace(mixed, shared_gate=torch.zeros(7, 1, device=device))  # sigmoid(0) is 1/2
    total, normed = add_rms_norm(x, half, weight=weight, eps=EPS)
    assert torch.equal(total, x + half.sum().to(dtype))
    again, alike = norms.add_rms_norm(x, half.sum().to(dtype), weight=weight, eps=EPS)
    assert torch.equal(total, again)
    torch.testing.assert_close(normed, alike)


def test_places_are_added_in_routing_order(device: str) -> None:
    # In float32, 1e8 + 1 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1: the order decides.
    results = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0]], device=device)[..., None]
    nothing = torch.zeros(2, 1, device=device)
    mixed = MixedExperts(results.contiguous(), None, shared=nothing, shared_gate=nothing)
    total, _ = add_rms_norm(nothing, mixed, weight=nothing[0], eps=EPS)
    assert total.flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("garbage", [0.0, -1e30, torch.inf])
def test_what_stands_in_places_of_no_expert_changes_no_bit(garbage: float, device: str) -> None:
    x, weight = normal(7, 96, seed=11, device=device), normal(96, seed=12, device=device)
    mixed = some_experts(7, 8, 96, device=device, shared_dtype=torch.float32)
    assert mixed.expert_ids is not None
    assert (mixed.expert_ids < 0).any()
    results = torch.where((mixed.expert_ids < 0)[..., None], garbage, mixed.results)
    got = add_rms_norm(x, replace(mixed, results=results), weight=weight, eps=EPS)
    expected = add_rms_norm(x, mixed, weight=weight, eps=EPS)
    assert all(map(torch.equal, got, expected))
    assert got[1].isfinite().all()


def test_rows_do_not_depend_on_the_rows_beside_them(device: str) -> None:
    x, weight = normal(7, 96, seed=13, device=device), normal(96, seed=14, device=device)
    mixed = some_experts(7, 3, 96, device=device, shared_dtype=torch.float32)
    assert mixed.expert_ids is not None
    last = MixedExperts(
        mixed.results[6:],
        mixed.expert_ids[6:],
        shared=mixed.shared[6:],
        shared_gate=mixed.shared_gate[6:],
    )
    got = add_rms_norm(x[6:], last, weight=weight, eps=EPS)
    whole = add_rms_norm(x, mixed, weight=weight, eps=EPS)
    assert all(torch.equal(y, rows[6:]) for y, rows in zip(got, whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_update_goes_to_the_norm_kernel(dtype: torch.dtype, device: str) -> None:
    x, update = normal(2, 3, 72, seed=15, device=device).to(dtype)
    weight = normal(72, seed=16, device=device)
    got = add_rms_norm(x, update, weight=weight, eps=EPS)
    assert all(map(torch.equal, got, norms.add_rms_norm(x, update, weight=weight, eps=EPS)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"results": torch.zeros(2, 8)}, r"results are \[2, 8\], not \[T, P, D\]"),
        ({"results": torch.zeros(2, 3, 7)}, r"results is \[2, 3, 7\], not \[2, 3, 8\]"),
        ({"results": torch.zeros(2, 3, 8).half()}, "results is torch.float16, not torch.float32"),
        ({"expert_ids": torch.zeros(2, 2).long()}, r"expert_ids is \[2, 2\], not \[2, 3\]"),
        ({"expert_ids": torch.zeros(2, 3).int()}, "expert_ids is torch.int32, not torch.int64"),
        ({"shared": torch.zeros(1, 8)}, r"shared is \[1, 8\], not \[2, 8\]"),
        ({"shared": torch.zeros(2, 8).long()}, "shared is torch.int64"),
        ({"shared": torch.zeros(8, 2).T}, "shared has a last stride of 2, not 1"),
        ({"shared_gate": torch.zeros(2)}, r"shared_gate is \[2\], not \[2, 1\]"),
        ({"shared_gate": torch.zeros(2, 1).half()}, "shared_gate is torch.float16"),
    ],
)
def test_wrong_calls_are_refused(changed: Mapping[str, Any], message: str) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    mixed = MixedExperts(
        torch.zeros(2, 3, 8), None, shared=torch.zeros(2, 8), shared_gate=torch.zeros(2, 1)
    )
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, replace(mixed, **changed), weight=weight, eps=EPS)


def test_rows_that_are_too_wide_are_refused() -> None:
    wide = torch.zeros(1, 5000)
    mixed = MixedExperts(wide[:, None], None, shared=wide, shared_gate=wide[:, :1])
    with pytest.raises(ValueError, match="5000 columns, from 1 to 4096"):
        add_rms_norm(wide, mixed, weight=wide[0], eps=EPS)
