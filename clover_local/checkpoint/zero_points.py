"""Zero points of asymmetric matrices: integers in files, minima in memory.

A stored 0 .. 2^bits - 1 stands for (stored - zero) * scale, so the minimum, the weight where 0 is
stored, is -zero * scale. In files zeros are packed as `int4.pack` packs, but along the rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.int4 import WORD_BITS, pack, unpack
from clover_local.kernels.packed import PackedWeight


def minimum_of(zeros: Tensor, scale: Tensor) -> Tensor:
    """-zero * scale, [N, G] float32, of integers `zeros` 0 .. 2^bits - 1 and `scale`, both [N, G].

    stored * scale + minimum is then (stored - zero) * scale to the last bit, since with scales of
    16 bits neither product nor the sum has more than 24. With scales of float32, which are rare
    beside zero points, the last bit may differ.
    """
    return (-zeros.float() * scale.float()).contiguous()


def packed_minimum(zero_points: Tensor, scale: Tensor, *, bits: int) -> Tensor:
    """`minimum_of` packed `zero_points` [ceil(N * bits / 32), G] and `scale` [N, G]."""
    values = unpack(zero_points.T.contiguous(), bits).T[: len(scale)]
    return minimum_of(values.float() + (1 << (bits - 1)), scale)


def zero_points_of(weight: PackedWeight) -> Tensor | None:
    """The packed zero points that `packed_minimum` turns into the weight's minima, bit for bit.

    None where there are none: minima that are no whole multiple of the scale.
    """
    if weight.minimum is None:
        return None
    half = 1 << (weight.bits - 1)
    scale = weight.scale.float()
    zeros = (-weight.minimum / scale).round()
    if not torch.equal(minimum_of(zeros, scale), weight.minimum):
        return None
    if not bool(((zeros >= 0) & (zeros < 2 * half)).all()):
        return None
    values = (zeros - half).to(torch.int8).T  # [G, N]
    per_word = WORD_BITS // weight.bits
    filled = F.pad(values, (0, -values.shape[1] % per_word), value=-half)
    return pack(filled, weight.bits).T.contiguous()
