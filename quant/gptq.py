"""GPTQ: columns are rounded one after the other, the rest makes good what each rounding lost.

Frantar et al. 2022 (arXiv 2210.17323) minimise tr(dW H dW^T) greedily: column k is rounded, and the
columns behind it take their best values given all deviations so far. They walk the Cholesky factor
of H^-1. Here the walk is over H itself, H = R R^T with R upper triangular (U = R^-1 is their
factor, so that the steps are the same): dW R has the column

    (dW R)[:, k] = sum_{i<k} d_i R[i, k] + d_k R[k, k],        d_i = weight - dequantized, column i,

and its square is all that column k adds to the loss. It vanishes at the updated weight

    w_k + carried_k / R[k, k],       carried_k = sum_{i<k} d_i R[i, k],

which is rounded (the nearest-plane view: Chen et al. 2025, arXiv 2507.18553). No inverse of H is
needed, which is most of the time at K = 2,048. `carried` is summed lazily, halving the columns, so
that nearly all sums are large products; leading dimensions (experts) go through every step at once.
Weights are held transposed, [B, K, N], so that a column is contiguous.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.quant.factor import Factor, factor
from clover_local.quant.rounding import (
    SCALE_DTYPE,
    FindScale,
    QuantizedWeight,
    absmax_scale,
    check_groups,
    compute_dtype,
    round_with,
)


@dataclass(frozen=True, eq=False)
class GptqResult:
    """Quantized weights [..., N, K], and what was done to the Hessians."""

    weight: QuantizedWeight
    damp: Tensor  # [...] float32: the damping used, as a share of the mean diagonal
    dead: Tensor  # [...] int64: how many inputs were zero in every row


def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    damp: float = 0.01,
    block_size: int = 32,
    find_scale: FindScale = absmax_scale,
) -> GptqResult:
    """Quantizes weights [..., N, K] so that outputs over the rows behind `hessian` change little.

    A group's scale is found from its updated weights when its first column is reached. Columns go
    in their own order. An input that is zero in every row (0 on the diagonal) is dead: its column
    becomes 0. A Hessian of zeros knows nothing: its weights are rounded, and all inputs are dead.

    Needs about three times the Hessians' and twice the weights' memory besides.

    Args:
        weight: finite, any float dtype; computed in float32, or float64 if it is that.
        hessian: [..., K, K], symmetric, of any scale.
        damp: positive; this share of the mean diagonal (of inputs that are not dead) is added to
            the diagonal, ten times as often as needed for a matrix that is not positive definite.
        block_size: columns between two sums of what is carried; changes the time, and sums by their
            rounding only.
        find_scale: is given the Hessian's diagonal as importance.

    Raises:
        ValueError: shapes that do not fit, `bits` not 4 or 8, a `group_size` that does not divide
            K, `damp` or `block_size` not positive, a Hessian that is not finite.
    """
    *batch, rows, columns = weight.shape
    check_groups(columns, bits=bits, group_size=group_size)
    if list(hessian.shape) != [*batch, columns, columns]:
        raise ValueError(
            f"Hessians are {tuple(hessian.shape)} for weights of {tuple(weight.shape)}"
        )
    if not damp > 0 or block_size < 1:
        raise ValueError(f"damp {damp} and block_size {block_size} are to be positive")
    wide = compute_dtype(weight).reshape(-1, rows, columns)
    damped = factor(hessian.reshape(-1, columns, columns).to(wide.dtype), damp)
    dead_columns = damped.dead & ~damped.dead.all(-1, keepdim=True)
    live = wide.masked_fill(dead_columns[:, None], 0).mT.contiguous()
    walk = _Walk(
        live, damped, bits=bits, group_size=group_size, block_size=block_size, find_scale=find_scale
    )
    walk.run(0, columns)
    return GptqResult(
        QuantizedWeight(
            walk.values.mT.reshape(weight.shape).contiguous(),
            walk.scale.mT.reshape(*batch, rows, columns // group_size).contiguous(),
            bits,
            group_size,
        ),
        damp=damped.damp.reshape(batch),
        dead=damped.dead.sum(-1).reshape(batch),
    )


class _Walk:
    """The columns of weights [B, K, N], from first to last."""

    def __init__(
        self,
        weight: Tensor,
        damped: Factor,
        *,
        bits: int,
        group_size: int,
        block_size: int,
        find_scale: FindScale,
    ) -> None:
        batch, columns, rows = weight.shape
        self.upper = damped.upper
        self.inverse = damped.upper.diagonal(dim1=-2, dim2=-1).reciprocal()[..., None]  # [B, K, 1]
        self.importance = damped.diagonal
        self.bits = bits
        self.group_size = group_size
        self.block_size = block_size
        self.find_scale = find_scale
        self.deviation = weight  # of columns that are done; of the others the weight itself
        self.carried = torch.zeros_like(weight)
        self.values = torch.empty_like(weight, dtype=torch.int8)
        self.scale = weight.new_empty((batch, columns // group_size, rows), dtype=SCALE_DTYPE)

    def run(self, start: int, end: int) -> None:
        """Quantizes whole groups or a part of one; `carried` holds all that precedes `start`."""
        columns, group_size, block_size = end - start, self.group_size, self.block_size
        if columns == group_size:
            self._find_scales(start, end)
        if columns <= min(group_size, block_size):
            self._round(start, end)
            return
        # In halves: of whole groups while there are several, then of whole blocks.
        step = group_size if columns > group_size else block_size
        middle = start + (columns + step - 1) // step // 2 * step
        self.run(start, middle)
        self.carried[:, middle:end].baddbmm_(
            self.upper[:, start:middle, middle:end].mT, self.deviation[:, start:middle]
        )
        self.run(middle, end)

    def _find_scales(self, start: int, end: int) -> None:
        """Scales of one group, from its weights as all deviations before it leave them best."""
        upper = self.upper[:, start:end, start:end]
        best = torch.linalg.solve_triangular(upper.mT, self.carried[:, start:end], upper=False)
        self.scale[:, start // self.group_size] = self.find_scale(
            best.add_(self.deviation[:, start:end]).mT,
            bits=self.bits,
            importance=self.importance[:, None, start:end],
        )

    def _round(self, start: int, end: int) -> None:
        """Columns of one group, one after the other."""
        scale = self.scale[:, start // self.group_size].to(self.deviation.dtype)
        for column in range(start, end):
            deviation, carried = self.deviation[:, column], self.carried[:, column]
            updated = torch.addcmul(deviation, carried, self.inverse[:, column])
            values = round_with(updated, scale, bits=self.bits)
            self.values[:, column] = values
            deviation.addcmul_(values, scale, value=-1)
            self.carried[:, column + 1 : end].addcmul_(
                self.upper[:, column, column + 1 : end, None], deviation[:, None]
            )
