"""y[M, N] = x[M, K] @ dequantize(weight[N, K]).T for a packed weight.

On a CPU with AVX2 or AVX-512 compiled kernels (`native/`) read the words as they lie, unpack them
in registers and multiply in float32: a product of few rows costs little more than reading the
packed weight. Activations are not rounded. Everywhere else (another CPU or system, groups of a size
that the kernels do not know, CUDA for now) the weight is dequantized, then multiplied.
"""

import numpy as np
import torch
from torch import Tensor

from clover_local.kernels.native.build import Kernel, Missing
from clover_local.kernels.native.launch import (
    format_of,
    kernel_for,
    multiply,
    pointers,
    spread,
)
from clover_local.kernels.native.matmul import JOB_ROWS
from clover_local.kernels.packed import PackedWeight


def packed_linear_reference(x: Tensor, weight: PackedWeight) -> Tensor:
    """The definition, in float32, with the dtype of `x`: [M, K] to [M, N]."""
    return (x.float() @ weight.dequantize().T).to(x.dtype)


def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`.

    By the compiled kernel where there is one (`kernel_for` says why not): there the bits of a row
    depend neither on the rows beside it nor on the number of threads.

    Raises:
        ValueError: `x` is not [M, K].
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, the weight {weight.shape}")
    kernel = kernel_for(weight)
    if isinstance(kernel, Missing) or x.device.type != "cpu":
        return packed_linear_reference(x, weight)
    return packed_linear_native(x, weight, kernel=kernel)


def packed_linear_native(x: Tensor, weight: PackedWeight, *, kernel: Kernel) -> Tensor:
    """`packed_linear` by the kernel that was compiled for this kind of weight; checks nothing."""
    rows = len(x)
    out = torch.empty(rows, weight.shape[0])
    if rows:
        place = pointers(weight)
        starts = range(0, rows, JOB_ROWS)
        multiply(
            kernel,
            np.array([(start, min(JOB_ROWS, rows - start), *place) for start in starts]),
            layout=format_of(weight),
            x=spread(kernel, x.float(), bits=weight.bits),
            x_rows=torch.arange(rows),
            out=out,
        )
    return out.to(x.dtype)
