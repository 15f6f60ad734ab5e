"""H = mean of x x^T over the rows that a weight sees: what its output error depends on.

The squared error of y = x W^T, summed over outputs, is tr(dW H dW^T) a row (times a constant that
changes nothing). Sums are kept while calibrating, means are what quantizers take, so that damping
and errors compare between experts that saw few rows and many.
"""

import torch
from torch import Tensor

CHUNK_ROWS = 4096
TINY = torch.finfo(torch.float32).tiny


def outer(x: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """sum_r weights[r] x[r] x[r]^T, [K, K] float32, of rows `x` [R, K] of any float dtype.

    Args:
        weights: [R], 0 or more; 1 each where not given.
    """
    total = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32)
    add_products(total, x, x, weights=weights)
    return total


def add_products(total: Tensor, a: Tensor, b: Tensor, *, weights: Tensor | None = None) -> None:
    """Adds sum_r weights[r] a[r] b[r]^T to `total` [N, K] float32, of rows [R, N] and [R, K]."""
    for start in range(0, len(b), CHUNK_ROWS):
        left, right = (rows[start : start + CHUNK_ROWS].float() for rows in (a, b))
        if weights is not None:
            right = right * weights[start : start + CHUNK_ROWS].float()[:, None]
        total.addmm_(left.T, right)


def shrink(
    own: Tensor, *, rows: Tensor, pooled: Tensor, pooled_rows: float, prior_rows: float
) -> Tensor:
    """(own + prior_rows * pooled mean) / (rows + prior_rows): mean Hessians [..., K, K].

    An expert that saw few rows knows little about K^2 numbers; what all experts of the layer saw
    counts as `prior_rows` further rows of its own. One with many rows keeps what it saw, one
    without any takes the pooled mean, and nothing jumps between.

    Args:
        own: [..., K, K] sums over each expert's rows, from `outer`.
        rows: [...] how many rows, or the sum of their weights.
        pooled: [K, K] the sum over all experts.
        pooled_rows: as `rows`, of `pooled`.
        prior_rows: positive.

    Raises:
        ValueError: `pooled_rows` or `prior_rows` is not positive.
    """
    if not pooled_rows > 0 or not prior_rows > 0:
        raise ValueError(
            f"{pooled_rows} pooled rows and {prior_rows} prior rows: both are positive"
        )
    mixed = own + pooled * (prior_rows / pooled_rows)
    return mixed.div_((rows.to(own) + prior_rows)[..., None, None])


def relative_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> Tensor:
    """tr(dW H dW^T) / tr(W H W^T), dW = weight - approximation: the share of the output lost.

    Any rows of a weight give an estimate for all, at their share of the cost.

    Args:
        weight: [..., N, K].
        approximation: [..., N, K], dequantized.
        hessian: [..., K, K].

    Returns:
        [...] float32, float64 where the Hessian is; 0 where both traces are 0.
    """
    weight, approximation = weight.to(hessian.dtype), approximation.to(hessian.dtype)
    # Both traces are scaled alike, so that neither squares out of range.
    unit = weight.abs().amax((-2, -1), keepdim=True).clamp(min=TINY)
    hessian = hessian / hessian.abs().amax((-2, -1), keepdim=True).clamp(min=TINY)
    lost = _energy((weight - approximation) / unit, hessian)
    whole = _energy(weight / unit, hessian)
    return torch.where(lost == 0, 0.0, lost / whole)


def _energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """tr(W H W^T), [...]; rounding may not make it negative."""
    return ((weight @ hessian) * weight).sum((-2, -1)).clamp(min=0)
