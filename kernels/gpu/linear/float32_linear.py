"""y[M, N] = x[M, K] @ weight[N, K].T in float32, for x of any float type: the router.

Defined by `linear` over x in float32. A router's choices are compared with each other, so its sums
are float32 throughout (no TF32), and x is widened as it is read, which saves a launch. A row's bits
do not depend on the rows beside it. For a pass or a commit: a prompt has BLAS.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_float, check_operand
from clover_local.kernels.gpu.gate import GateCase

MOST_ROWS = 64


@dataclass(frozen=True)
class Float32Config:
    """The tile of a program, columns a step, warps and pipeline stages."""

    up_to_rows: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Not measured on a card yet. 257 features by 8 are 33 programs, each of which reads 64 KB of the
# weight; wider tiles would leave more multiprocessors idle, and this launch is all there is to do.
CONFIGS = (
    Float32Config(16, block_m=16, block_n=8, block_k=128, num_warps=4, num_stages=3),
    Float32Config(MOST_ROWS, block_m=32, block_n=8, block_k=128, num_warps=4, num_stages=3),
)


@triton.jit(do_not_specialize=["rows"])
def float32_linear_kernel(
    x,
    weight,
    y,
    rows,
    features,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (features, rows): one tile of y."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_rows = x + m.to(tl.int64)[:, None] * columns
    weight_rows = weight + n.to(tl.int64)[None, :] * columns
    for first in range(0, columns, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < columns
        left = tl.load(x_rows + k[None, :], (m < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight_rows + k[:, None], (n < features)[None, :] & inside[:, None], other=0.0
        )
        acc = tl.dot(left.to(tl.float32), right, acc, input_precision="ieee")
    at = y + m.to(tl.int64)[:, None] * features + n[None, :]
    tl.store(at, acc, mask=(m < rows)[:, None] & (n < features)[None, :])


def float32_linear(x: Tensor, weight: Tensor, *, config: Float32Config | None = None) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed: [M, N] float32.

    Args:
        x: bfloat16, float16 or float32; contiguous; at most 64 rows.
        weight: float32, contiguous.
        config: one of `CONFIGS`; by the number of rows if not given.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {list(x.shape)}, the weight {list(weight.shape)}")
    rows, columns = x.shape
    features = len(weight)
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows, from 1 to {MOST_ROWS} are possible")
    check_float("x", x)
    check_operand("x", x, device=x.device)
    check_dense("weight", weight, shape=weight.shape, like=x)
    config = config or next(config for config in CONFIGS if rows <= config.up_to_rows)
    y = torch.empty(rows, features, dtype=torch.float32, device=x.device)
    tiles = (triton.cdiv(features, config.block_n), triton.cdiv(rows, config.block_m))
    float32_linear_kernel[tiles](
        x=x,
        weight=weight,
        y=y,
        rows=rows,
        features=features,
        columns=columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's router, with the shared expert's gate: 257 x 2,048."""
    types = {"weight": "*fp32", "y": "*fp32", "rows": "i32", "features": "i32", "columns": "i32"}
    return tuple(
        GateCase(
            name=f"float32_linear M {config.up_to_rows} {name}",
            fn=float32_linear_kernel,
            signature=types | {"x": dtype},
            constexprs={
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            wants_cp_async=True,
        )
        for config in CONFIGS
        for name, dtype in (("bf16", "*bf16"), ("f32", "*fp32"))
    )
