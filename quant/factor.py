"""Cholesky factors of damped Hessians: what GPTQ walks along, and what least squares solves with.

A Hessian over few rows, or over rows that hardly differ, is not positive definite in float32. Each
gets as much on its diagonal as it needs, and no less than asked for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RAISE = 10.0  # of the damping, for a matrix that is not positive definite
MOST_DAMP = 1e12


@dataclass(frozen=True, eq=False)
class Factor:
    """H = upper upper^T, H scaled to a mean diagonal of 1 and damped."""

    upper: Tensor  # [B, K, K]
    mean: Tensor  # [B]: what H was divided by
    diagonal: Tensor  # [B, K], of the scaled H before the damping, 1 where an input is dead
    damp: Tensor  # [B] float32
    dead: Tensor  # [B, K] bool


def factor(hessian: Tensor, damp: float) -> Factor:
    """Factors [B, K, K], each with as much damping as it needs.

    Args:
        damp: this share of the mean diagonal (of inputs that are not dead) is added to the
            diagonal, ten times as often as needed for a matrix that is not positive definite.

    Raises:
        ValueError: a Hessian that is not finite.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    dead = diagonal == 0
    # In float64, where no sum of float32 overflows.
    mean = diagonal.double().abs().sum(-1) / (~dead).sum(-1).clamp(min=1)
    mean = torch.where(mean > 0, mean, 1.0).to(hessian.dtype)[:, None]
    diagonal = torch.where(dead, 1.0, diagonal / mean)
    damps = torch.full_like(mean[:, 0], damp)
    # The Cholesky factor of a matrix read backwards is lower triangular; itself read backwards it
    # is the upper one.
    backwards = hessian.flip(-1, -2).div_(mean[..., None])
    lower, info = _damped_cholesky(backwards, diagonal + damp)
    while len(failed := info.nonzero()[:, 0]):
        damps[failed] *= RAISE
        if float(damps.max()) > MOST_DAMP:
            raise ValueError(f"no damping up to {MOST_DAMP:g} makes a Hessian positive definite")
        lower[failed], info[failed] = _damped_cholesky(
            backwards[failed], diagonal[failed] + damps[failed, None]
        )
    del backwards
    return Factor(lower.flip(-1, -2), mean[:, 0], diagonal, damps.float(), dead)


def _damped_cholesky(backwards: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors and failures (not 0) of `backwards`, which gets `diagonal`, read backwards."""
    backwards.diagonal(dim1=-2, dim2=-1).copy_(diagonal.flip(-1))
    lower, info = torch.linalg.cholesky_ex(backwards)
    return lower, info
