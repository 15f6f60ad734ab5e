"""The norm kernels against the plain operators, odd widths and strided heads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clover_local.kernels import norms as plain
from clover_local.kernels.gpu.norms import (
    CONFIGS,
    NormConfig,
    add_rms_norm,
    gate_cases,
    gated_rms_norm,
    norm_rotary,
    rms_norm,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def normal(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def check_close(got: Tensor, expected: Tensor) -> None:
    """As close as one rounding to the dtype allows."""
    assert got.dtype == expected.dtype
    step = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
    torch.testing.assert_close(got, expected, atol=step * 0.01, rtol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (2, 2048), (1, 3000)])
def test_rms_norm_is_the_plain_one(
    rows: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    x = normal(rows, columns, seed=1, device=device, dtype=dtype)
    weight = normal(columns, seed=2, device=device)
    check_close(rms_norm(x, weight, eps=EPS), plain.rms_norm(x, weight, eps=EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_rounded_before_its_norm(dtype: torch.dtype, device: str) -> None:
    x, update = (normal(3, 72, seed=seed, device=device, dtype=dtype) for seed in (3, 4))
    weight = normal(72, seed=5, device=device)
    total, normed = add_rms_norm(x, update, weight=weight, eps=EPS)
    assert torch.equal(total, x + update)
    check_close(normed, plain.rms_norm(x + update, weight, eps=EPS))


def test_rows_may_lie_apart(device: str) -> None:
    wide = normal(3, 50, seed=6, device=device)
    x, update = wide[:, :24], wide[:, 26:]
    weight = normal(24, seed=7, device=device)
    total, normed = add_rms_norm(x, update, weight=weight, eps=EPS)
    assert torch.equal(total, x + update)
    check_close(normed, plain.rms_norm(x + update, weight, eps=EPS))
    check_close(rms_norm(x, weight, eps=EPS), plain.rms_norm(x, weight, eps=EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm_has_the_dtype_of_its_gate(dtype: torch.dtype, device: str) -> None:
    rows, heads, columns = 3, 2, 20
    x = normal(rows, heads, columns, seed=8, device=device)
    both = normal(rows, heads * columns + 9, seed=9, device=device, dtype=dtype)
    gate = both[:, 9:].view(rows, heads, columns)
    weight = normal(columns, seed=10, device=device)
    got = gated_rms_norm(x, weight, gate=gate, eps=EPS)
    check_close(got, plain.gated_rms_norm(x, weight, gate=gate, eps=EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "columns", "half"), [(1, 2, 1, 256, 32), (3, 3, 2, 24, 3)]
)
def test_queries_and_keys_are_normed_then_rotated(
    rows: int,
    heads: int,
    key_heads: int,
    columns: int,
    half: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    # As in the model: queries and their gates take turns, and all is one projection's output.
    size = (2 * heads + 2 * key_heads) * columns
    together = normal(rows, size, seed=11, device=device, dtype=dtype)
    q = together[:, : 2 * heads * columns].view(rows, heads, 2 * columns)[..., :columns]
    k = together[:, 2 * heads * columns :][:, : key_heads * columns].view(rows, key_heads, columns)
    q_weight, k_weight = (normal(columns, seed=seed, device=device) for seed in (12, 13))
    cos, sin = plain.rotary_angles(
        torch.arange(1000, 1000 + rows, device=device), theta=1e7, rotary_dim=2 * half
    )
    got = norm_rotary(q, k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, eps=EPS)
    for x, weight, y in ((q, q_weight, got[0]), (k, k_weight, got[1])):
        normed = plain.rms_norm(x, weight, eps=EPS)
        check_close(y, plain.rotary(normed, cos=cos, sin=sin))
        assert y.is_contiguous()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"D{config.up_to_columns}")
def test_every_configuration_gives_the_norm(config: NormConfig, device: str) -> None:
    x, weight = normal(2, 33, seed=14, device=device), normal(33, seed=15, device=device)
    got = rms_norm(x, weight, eps=EPS, config=config)
    check_close(got, plain.rms_norm(x, weight, eps=EPS))


X = torch.zeros(2, 3, 8)
W = torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, W[:7], eps=EPS), "weight is [7], not [8]"),
        (lambda: rms_norm(X.long(), W, eps=EPS), "x is torch.int64"),
        (lambda: rms_norm(X[:, :2], W, eps=EPS), "x has strides (24, 8, 1)"),
        (lambda: rms_norm(torch.zeros(1, 20000), torch.zeros(20000), eps=EPS), "20000 columns"),
        (lambda: add_rms_norm(X, X.half(), weight=W, eps=EPS), "update is torch.float16"),
        (lambda: gated_rms_norm(X[0], W, gate=X[0], eps=EPS), "x is [3, 8], not [T, H, D]"),
        (lambda: gated_rms_norm(X, W, gate=X[:1], eps=EPS), "gate is [1, 3, 8], not [2, 3, 8]"),
        (
            lambda: norm_rotary(
                X, X, q_weight=W, k_weight=W, cos=torch.zeros(2, 5), sin=torch.zeros(2, 5), eps=EPS
            ),
            "10 dimensions to rotate, heads have 8",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_the_gate_has_every_kernel() -> None:
    names = {"add_rms_norm", "rms_norm", "gated_rms_norm", "norm_rotary"}
    assert {case.name for case in gate_cases()} == names
