"""Weights that make good what was lost before them: targets for quantizing on drifted inputs.

The rows x^ that a quantized model gives a matrix are not the rows x that its source gives: the
trunk and the layers before are rounded too. What the matrix should do with x^ is what the source
does with x, and the weight that comes closest, by least squares with a ridge, is

    W* = argmin mean |W x + d - W* x^|^2 + damp |W* - W|^2 = W + (W C + D) (H + damp)^-1
    C = mean (x - x^) x^^T,    D = mean d x^^T,    H = mean x^ x^^T

where d is whatever else the output has to make good; of a down projection it is the drift of the
hidden states that the experts' outputs are added to. GPTQ then rounds W* on H.

This is the aim of asymmetric calibration (GPTAQ: Li et al. 2025, arXiv 2504.02692), which adds a
term for x - x^ to every step of GPTQ's loop. Correcting the weight first solves the same problem
before any rounding, has the ridge that few rows need, takes d as well, and leaves the loop alone.
"""

import torch
from torch import Tensor

from clover_local.quant.factor import factor
from clover_local.quant.rounding import compute_dtype


def corrected(
    weight: Tensor, hessian: Tensor, *, cross: Tensor, drift: Tensor | None = None, damp: float
) -> Tensor:
    """W + (W cross + drift) (H + damp)^-1, [..., N, K] float32, or float64 where the weight is.

    Without any difference between the rows it is the weight itself. Inputs that are zero in every
    row keep their columns.

    Args:
        weight: [..., N, K], any float dtype.
        hessian: [..., K, K], mean x^ x^^T.
        cross: [..., K, K], mean (x - x^) x^^T.
        drift: [..., N, K], mean d x^^T; none where not given.
        damp: positive, as a share of the mean diagonal; raised as in GPTQ.

    Raises:
        ValueError: shapes that do not fit, a `damp` that is not positive, a Hessian that is not
            finite.
    """
    *batch, rows, columns = weight.shape
    square = [*batch, columns, columns]
    if list(hessian.shape) != square or list(cross.shape) != square:
        raise ValueError(
            f"Hessians are {tuple(hessian.shape)} and cross products {tuple(cross.shape)} "
            f"for weights of {tuple(weight.shape)}"
        )
    if drift is not None and drift.shape != weight.shape:
        raise ValueError(f"drift is {tuple(drift.shape)} for weights of {tuple(weight.shape)}")
    if not damp > 0:
        raise ValueError(f"damp {damp} is to be positive")
    wide = compute_dtype(weight)
    damped = factor(hessian.reshape(-1, columns, columns).to(wide.dtype), damp)
    missing = wide @ cross.to(wide.dtype)
    if drift is not None:
        missing += drift.to(wide.dtype)
    missing = missing.reshape(-1, rows, columns).div_(damped.mean[:, None, None])
    upper = damped.upper
    half = torch.linalg.solve_triangular(upper.mT, missing, upper=False, left=False)
    change: Tensor = torch.linalg.solve_triangular(upper, half, upper=True, left=False)
    return wide + change.reshape(weight.shape)
