"""y[M, N] = x[M, K] @ weight[N, K].T, and the layout of `weight` that makes it fast.

On a CPU a pass has 1 to 32 rows, so a product costs what reading its weight costs; the BLAS behind
`F.linear` needs two to five times that for 1 to 8 rows, and rounds a row differently with the
number of rows beside it. oneDNN's kernels over a weight that was blocked once at load come close to
the read, and give a row the same bits in any company of two or more rows.

`mkldnn._reorder_linear_weight` and `mkldnn._linear_pointwise` are private operators of torch, those
to which `torch.compile` lowers a linear map with a frozen weight; there is no public way to them.
pyproject.toml holds torch to the minor version that they were tested with.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.choice import on_gpu
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.kernels.packed_linear import packed_linear

BLOCKED_ELEMENTS = 1 << 18
"""Smaller weights stay plain: there the 10 microseconds that oneDNN takes to start weigh more."""


def blocked_weight(weight: Weight) -> Weight:
    """`weight` [N, K] in the layout that `linear` runs fastest on: a copy, or the weight itself.

    A packed weight stays as it is, but for a GPU's kernels it starts at a multiple of 16 bytes; for
    a plain one see `blocked_tensor`.
    """
    if isinstance(weight, PackedWeight):
        return weight.aligned() if on_gpu(weight.data) else weight
    return blocked_tensor(weight)


def blocked_tensor(weight: Tensor) -> Tensor:
    """A plain weight [N, K] in the layout that `linear` runs fastest on, or the weight itself.

    A blocked weight is opaque (`weight.is_mkldnn`): it has a shape, but nothing reads its elements.
    """
    suits = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= BLOCKED_ELEMENTS
        and not on_gpu(weight)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
    if not suits:
        return weight
    # (weight, rows of x that the layout is meant for: any)
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return blocked


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed, packed, plain or from `blocked_weight`."""
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight)
    if not weight.is_mkldnn:
        return F.linear(x, weight)
    # (x, weight, bias, function of the result, its arguments, its algorithm)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
