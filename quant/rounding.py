"""value[n, k] = clamp(round(weight[n, k] / scale[n, g])), g = k // group_size: rounding by groups.

Symmetric integers, as compressed-tensors defines them: -2^(bits-1) .. 2^(bits-1) - 1, no zero
point, scales of bfloat16. The baseline that GPTQ is measured against, and the two ways to find a
scale that both share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clover_local.kernels.int4 import BITS, pack
from clover_local.kernels.packed import PackedWeight

SCALE_DTYPE = torch.bfloat16
SHRINK_FACTORS = tuple(1.0 - 0.02 * step for step in range(20))


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weights [..., N, K] as integers, with a scale for each group of columns."""

    values: Tensor  # [..., N, K] int8
    scale: Tensor  # [..., N, K / group_size] bfloat16
    bits: int
    group_size: int

    def dequantize(self) -> Tensor:
        """The weights [..., N, K] in float32."""
        groups = torch.unflatten(self.values.float(), -1, (-1, self.group_size))
        return (groups * self.scale.float()[..., None]).flatten(-2)

    def unbind(self) -> Iterator["QuantizedWeight"]:
        """The weights along the first dimension, one after the other."""
        for values, scale in zip(self.values, self.scale, strict=True):
            yield QuantizedWeight(values, scale, self.bits, self.group_size)

    def pack(self) -> PackedWeight:
        """One weight [N, K] as the runtime and the files hold it.

        Raises:
            ValueError: leading dimensions, or a K that fills no whole words.
        """
        if self.values.dim() != 2:
            raise ValueError(f"a weight of shape {tuple(self.values.shape)}: pack one [N, K]")
        return PackedWeight(
            pack(self.values, self.bits), self.scale, None, self.bits, self.group_size
        )


class FindScale(Protocol):
    """Chooses the scale of a group."""

    def __call__(self, weight: Tensor, *, bits: int, importance: Tensor | None = None) -> Tensor:
        """Scales [...] bfloat16, positive, of groups `weight` [..., g].

        `importance` [..., g], or of fewer dimensions, says what a squared error in a column costs.
        """


def absmax_scale(weight: Tensor, *, bits: int, importance: Tensor | None = None) -> Tensor:
    """max |weight| * 2 / (2^bits - 1), the rule of compressed-tensors; 1 for a group of zeros.

    The largest weight then lies half a step outside the integers on one side and on the last one on
    the other: less error for all the others than if both ends fitted.
    """
    return _usable(weight.abs().amax(-1) * (2 / (2**bits - 1)), bits)


def searched_scale(weight: Tensor, *, bits: int, importance: Tensor | None = None) -> Tensor:
    """`absmax_scale` times the one of `SHRINK_FACTORS` with the least weighted squared error."""
    largest = weight.abs().amax(-1) * (2 / (2**bits - 1))
    best_scale = _usable(largest, bits)
    best_error: Tensor | None = None
    for factor in SHRINK_FACTORS:
        scale = _usable(largest * factor, bits)
        wide = scale.to(weight.dtype)[..., None]
        error = (weight - round_with(weight, wide, bits=bits) * wide).square()
        total = (error if importance is None else error * importance).sum(-1)
        if best_error is None:
            best_error = total
            continue
        better = total < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, total, best_error)
    return best_scale


def round_with(weight: Tensor, scale: Tensor, *, bits: int) -> Tensor:
    """clamp(round(weight / scale)) in the weight's dtype; ties go to even."""
    half = 1 << (bits - 1)
    return (weight / scale).round_().clamp_(-half, half - 1)


def round_to_nearest(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    find_scale: FindScale = absmax_scale,
    importance: Tensor | None = None,
) -> QuantizedWeight:
    """Rounds weights [..., N, K] to the nearest integers, each group by its own scale.

    Args:
        weight: finite, any float dtype; computed in float32, or float64 if it is that.
        importance: [..., K], for a `find_scale` that uses it: the diagonal of the Hessian.

    Raises:
        ValueError: `bits` is not 4 or 8, or `group_size` does not divide K.
    """
    check_groups(weight.shape[-1], bits=bits, group_size=group_size)
    groups = torch.unflatten(compute_dtype(weight), -1, (-1, group_size))  # [..., N, G, g]
    if importance is not None:
        importance = torch.unflatten(importance, -1, (-1, group_size))[..., None, :, :]
    scale = find_scale(groups, bits=bits, importance=importance)
    values = round_with(groups, scale.to(groups.dtype)[..., None], bits=bits)
    return QuantizedWeight(values.flatten(-2).to(torch.int8), scale, bits, group_size)


def compute_dtype(weight: Tensor) -> Tensor:
    """`weight` in float32; float64 stays."""
    return weight if weight.dtype == torch.float64 else weight.float()


def check_groups(columns: int, *, bits: int, group_size: int) -> None:
    """Raises ValueError where `columns` cannot be quantized like that."""
    if bits not in BITS:
        raise ValueError(f"{bits} bits, the widths are 4 and 8")
    if group_size < 1 or columns % group_size:
        raise ValueError(f"group_size {group_size} does not divide the {columns} columns")


def _usable(scale: Tensor, bits: int) -> Tensor:
    """In bfloat16: 1 where it vanishes, and finite when multiplied with any of the integers."""
    highest = torch.finfo(SCALE_DTYPE).max / 2**bits
    rounded = scale.clamp(max=highest).to(SCALE_DTYPE)
    return torch.where(rounded > 0, rounded, 1.0)
