"""A linear map without bias."""

import torch
from torch import Tensor

from clover_local.kernels import dispatch


class Linear:
    """y = x @ weight.T; several weights over the same x are stacked into one product."""

    def __init__(self, *weights: Tensor) -> None:
        """Each weight is [out, in], with the same `in`; outputs follow each other in this order."""
        stacked = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.weight = dispatch.blocked_weight(stacked)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return dispatch.linear(x, self.weight)
