"""bfloat16 kernels calculate as torch does: in the interpreter the fixture sees to it."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 64


@triton.jit
def arithmetic_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + SIZE + i, a - b)
    tl.store(out + 2 * SIZE + i, a * b)
    tl.store(out + 3 * SIZE + i, -a)
    tl.store(out + 4 * SIZE + i, tl.abs(a))
    tl.store(out + 5 * SIZE + i, tl.where(a < b, a, b))
    tl.store(out + 6 * SIZE + i, tl.maximum(a, b).to(tl.bfloat16))
    tl.store(out + 7 * SIZE + i, a * 2.5 + tl.full([SIZE], 0.3, tl.bfloat16))


@triton.jit
def convert_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def bitcast_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    halves = (tl.load(x + i) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(out + i, halves - 136.0)


@triton.jit
def reduce_kernel(x, out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    r = tl.arange(0, ROWS)
    a = tl.load(x + r[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    tl.store(out + r, tl.sum(a, axis=1))
    tl.store(out + ROWS + r, tl.max(a, axis=1))


@triton.jit
def dot_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    acc = tl.full([SIZE, SIZE], 1.0, tl.float32)
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), acc))


def random(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * 100).to(dtype).to(device)


def launch(kernel: Any, **arguments: Any) -> None:
    kernel[(1,)](**arguments)


def test_arithmetic_rounds_each_result_once(device: str) -> None:
    x, y = (random(SIZE, seed=seed, device=device) for seed in (1, 2))
    out = torch.empty(8, SIZE, dtype=torch.bfloat16, device=device)
    launch(arithmetic_kernel, x=x, y=y, out=out, SIZE=SIZE)
    lesser = torch.minimum(x, y)
    expected = [x + y, x - y, x * y, -x, x.abs(), lesser, torch.maximum(x, y)]
    assert torch.equal(out[:7], torch.stack(expected))
    # A card may keep the product's digits for the sum.
    torch.testing.assert_close(out[7], x * 2.5 + 0.3)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_conversions_are_those_of_torch(
    source: torch.dtype, target: torch.dtype, device: str
) -> None:
    x = random(SIZE, seed=3, device=device, dtype=source)
    out = torch.empty(SIZE, dtype=target, device=device)
    launch(convert_kernel, x=x, out=out, SIZE=SIZE)
    assert torch.equal(out, x.to(target))


def test_float32_is_rounded_to_nearest_even(device: str) -> None:
    step = 2.0**-7  # of bfloat16 numbers between 1 and 2
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-40]
    ties = [1 + step * (n + half) for n in range(8) for half in (0.5, 0.49, 0.51)]
    x = torch.zeros(SIZE, device=device)
    x[: len(ties) + len(special)] = torch.tensor(special + ties)
    out = torch.empty(SIZE, dtype=torch.bfloat16, device=device)
    launch(convert_kernel, x=x, out=out, SIZE=SIZE)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[:2], x.signbit()[:2])


def test_integers_put_into_the_bits_are_numbers(device: str) -> None:
    values = torch.arange(SIZE, dtype=torch.int32, device=device)
    out = torch.empty(SIZE, dtype=torch.bfloat16, device=device)
    launch(bitcast_kernel, x=(0x4300 + values) << 16, out=out, SIZE=SIZE)
    assert torch.equal(out.float(), values.float() - 8)


def test_sums_and_largest_elements_of_rows(device: str) -> None:
    x = random(4, SIZE, seed=4, device=device)
    out = torch.empty(2, 4, device=device)
    launch(reduce_kernel, x=x, out=out, ROWS=4, SIZE=SIZE)
    # A card may round each partial sum to bfloat16.
    torch.testing.assert_close(out[0], x.float().sum(1), rtol=2**-6, atol=4.0)
    assert torch.equal(out[1], x.float().amax(1))


def test_products_of_matrices_are_summed_in_float32(device: str) -> None:
    x, y = (random(SIZE, SIZE, seed=seed, device=device) for seed in (5, 6))
    out = torch.empty(SIZE, SIZE, device=device)
    launch(dot_kernel, x=x, y=y, out=out, SIZE=SIZE)
    torch.testing.assert_close(out, x.float() @ y.float() + 1, rtol=1e-5, atol=1.0)
