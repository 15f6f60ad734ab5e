"""Packed weights in other groups: where a kernel or a neighbour needs a format that they lack."""

import torch

from clover_local.checkpoint.packed import GPU_GROUP
from clover_local.kernels.int4 import pack
from clover_local.kernels.packed import PackedWeight


def as_int8(weight: PackedWeight, *, group_size: int) -> PackedWeight:
    """The nearest INT8 in groups of `group_size`, scaled by the largest number of each.

    The error is at most 1/254 of that number.
    """
    groups = torch.unflatten(weight.dequantize(), 1, (-1, group_size))
    scale = groups.abs().amax(-1) / 127
    divisor = scale.masked_fill(scale == 0, 1)[..., None]
    values = (groups / divisor).round().clamp(-127, 127).char().flatten(1)
    return PackedWeight(pack(values, 8), scale, None, 8, group_size)


def for_device(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """The weight as it is, or on a GPU as INT8 where its groups are too small for the kernels."""
    if device.type == "cpu" or weight.group_size % GPU_GROUP == 0:
        return weight
    return as_int8(weight, group_size=GPU_GROUP)
