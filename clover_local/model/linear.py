"""A linear map without bias."""

import torch
from torch import Tensor

from clover_local.kernels import dispatch
from clover_local.kernels.packed import PackedWeight, Weight, same_format, stack


class Linear:
    """y = x @ weight.T; neighbours of one format over the same x are stacked into one product."""

    def __init__(self, *weights: Weight) -> None:
        """Each weight is [out, in], with the same `in`; outputs follow each other in this order."""
        alike: list[list[Weight]] = []
        for weight in weights:
            if alike and same_format(alike[-1][0], weight):
                alike[-1].append(weight)
            else:
                alike.append([weight])
        self.weights = tuple(dispatch.blocked_weight(_stacked(part)) for part in alike)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        parts = [dispatch.linear(x, weight) for weight in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _stacked(alike: list[Weight]) -> Weight:
    """Weights of one format, one below the other."""
    if len(alike) == 1:
        return alike[0]
    packed = [weight for weight in alike if isinstance(weight, PackedWeight)]
    plain = [weight for weight in alike if isinstance(weight, Tensor)]
    return stack(packed) if packed else torch.cat(plain)
