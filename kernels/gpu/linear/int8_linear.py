"""y[M, N] = x[M, K] @ dequantize(weight[N, K]).T for a weight of 8 bits (W8A16).

Defined by `packed_linear_reference`; the kernel is in `packed_linear.py`. A linear map of few rows
costs what reading its weight costs: tiles are chosen so that enough bytes are on their way (the
card's 896 GB/s times its latency of about a microsecond are 13 KB for each of 70 multiprocessors).
"""

import torch
from torch import Tensor

from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.linear.packed_linear import (
    ANY,
    LinearConfig,
    SplitWorkspace,
    choose,
    gate_case,
    launch,
)
from clover_local.kernels.packed import PackedWeight

NARROW = 4096
WIDE = 65536

# Not measured on a card yet: chosen by counting (registers, shared memory, bytes in flight).
CONFIGS = (
    # A narrow weight has 32 tiles for 2,048 features: four programs a tile make 128.
    LinearConfig(8, NARROW, 64, 8, piece=128, block_k=128, splits=4, num_warps=4, num_stages=3),
    LinearConfig(8, ANY, 64, 8, piece=128, block_k=128, splits=1, num_warps=4, num_stages=3),
    LinearConfig(16, NARROW, 64, 16, piece=128, block_k=128, splits=4, num_warps=4, num_stages=3),
    LinearConfig(16, ANY, 64, 16, piece=128, block_k=128, splits=1, num_warps=4, num_stages=3),
    LinearConfig(32, NARROW, 64, 32, piece=64, block_k=128, splits=4, num_warps=4, num_stages=3),
    LinearConfig(32, WIDE, 64, 32, piece=64, block_k=128, splits=1, num_warps=4, num_stages=3),
    # The vocabulary: x is read once for 128 features, else that took as much of L2 as the weight.
    LinearConfig(32, ANY, 128, 32, piece=64, block_k=128, splits=1, num_warps=8, num_stages=3),
    LinearConfig(64, NARROW, 128, 64, piece=64, block_k=64, splits=4, num_warps=8, num_stages=4),
    LinearConfig(64, ANY, 128, 64, piece=64, block_k=64, splits=1, num_warps=8, num_stages=4),
    # A prompt: matrix instructions are the limit, so each weight is unpacked for 128 rows. Minima
    # need a third accumulator, which does not fit beside two of this size.
    LinearConfig(
        ANY,
        ANY,
        128,
        128,
        piece=64,
        block_k=64,
        splits=1,
        num_warps=8,
        num_stages=3,
        with_minimum=False,
    ),
    LinearConfig(ANY, ANY, 128, 64, piece=64, block_k=64, splits=1, num_warps=8, num_stages=4),
)


def int8_linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    config: LinearConfig | None = None,
    workspace: SplitWorkspace | None = None,
) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`.

    Args:
        x: bfloat16, float16 or float32; contiguous, its start a multiple of 16 bytes.
        weight: 8 bits, groups a multiple of 32; contiguous parts, aligned like x.
        config: one of `CONFIGS`; by the shape if not given.
        workspace: from `split_workspace`, to be used by launches in turn; without one a launch that
            splits columns makes its own.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    return launch(x, weight, bits=8, configs=CONFIGS, config=config, workspace=workspace)


def gate_cases() -> tuple[GateCase, ...]:
    """Every configuration in groups of 128, as the trunk has; and what imported weights may ask."""
    every = [gate_case("int8_linear", config, bits=8, group_size=128) for config in CONFIGS]
    others = (
        (64, NARROW, 32, True, torch.bfloat16),
        (2048, NARROW, 32, False, torch.bfloat16),
        (2048, NARROW, 128, True, torch.float16),
    )
    chosen = [
        gate_case(
            "int8_linear",
            choose(CONFIGS, rows=rows, features=features, minimum=minimum),
            bits=8,
            group_size=group_size,
            minimum=minimum,
            dtype=dtype,
        )
        for rows, features, group_size, minimum, dtype in others
    ]
    return (*every, *chosen)
