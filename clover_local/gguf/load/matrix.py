"""A tensor of a GGUF file, or one expert's part of it, as the parameter that it stands for.

Decoded, then led back to the checkpoint's conventions: heads grouped, norms without the 1, A_log.
Nothing is rounded on the way but where this says so: a head order that cuts groups of a quantized
matrix in two leaves it float32, and gate and up of different types both become INT8 g32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clover_local.checkpoint.packed import PackedFormat
from clover_local.gguf.tensors import Heads, Value
from clover_local.gguf.types import PACKED_FORMATS, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from clover_local.kernels.packed import PackedWeight, Weight

_UNLIKE_GROUP = 32  # of INT8, where gate and up have different types


@dataclass(frozen=True, eq=False)
class GgufMatrix:
    """`nbytes` bytes from `start` on, in blocks of `type`, and what becomes of them."""

    name: str
    type: TensorType
    shard: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]  # of the parameter
    value: Value
    heads: Heads
    order: NDArray[np.int64] | None  # `file[i] = parameter[order[i]]`
    plain: bool  # whether the parameter must be no PackedWeight
    unlike: bool = False  # gate and up have different types

    @property
    def dtype(self) -> str:
        """The type's name."""
        return self.type.name

    @property
    def format(self) -> PackedFormat | None:
        """The format that `decode` gives; None where that is plain."""
        layout = PACKED_FORMATS.get(self.type.name)
        if layout is None or self.plain:
            return None
        if self.heads is Heads.COLUMNS and self.order is not None:
            inverse = np.argsort(self.order)
            if _group_order(inverse, layout.group_size) is None:
                return None
        return PackedFormat(8, _UNLIKE_GROUP, True, "F32") if self.unlike else layout

    def decode(self, content: Tensor) -> Weight:
        """The parameter from its bytes."""
        import torch

        from clover_local.gguf.load.decode import decode

        columns = self.shape[-1]
        rows = int(np.prod(self.shape[:-1]))
        weight = decode(content, self.type, (rows, columns))
        if isinstance(weight, torch.Tensor):
            return self._changed(weight.view(self.shape))
        if self.plain:
            return self._changed(weight.dequantize().view(self.shape))
        if self.order is not None:
            inverse = np.argsort(self.order)
            if self.heads is not Heads.COLUMNS:
                weight = weight.rows(torch.from_numpy(inverse))
            elif (groups := _group_order(inverse, weight.group_size)) is not None:
                weight = _groups(weight, torch.from_numpy(groups))
            else:
                return weight.dequantize()[:, torch.from_numpy(inverse)]
        if not self.unlike:
            return weight
        from clover_local.checkpoint.regroup import as_int8

        return as_int8(weight, group_size=_UNLIKE_GROUP)

    def _changed(self, tensor: Tensor) -> Tensor:
        import torch

        if self.order is not None:
            inverse = torch.from_numpy(np.argsort(self.order))
            tensor = tensor[:, inverse] if self.heads is Heads.COLUMNS else tensor[inverse]
        if self.value is Value.PLUS_ONE:
            return tensor.float() - 1
        if self.value is Value.MINUS_EXP:
            return _log(-tensor.float())
        return tensor


def _log(decay: Tensor) -> Tensor:
    """The float32 whose exp comes nearest to `decay`: rounding back and forth then ends."""
    import torch

    middle = decay.double().log().float()
    infinity = torch.tensor(float("inf"))
    candidates = torch.stack(
        [torch.nextafter(middle, -infinity), middle, torch.nextafter(middle, infinity)]
    )
    distance = (candidates.double().exp() - decay.double()).abs()
    best = distance.nan_to_num(nan=float("inf")).argmin(0, keepdim=True)
    return candidates.gather(0, best)[0]


def _group_order(order: NDArray[np.int64], size: int) -> NDArray[np.int64] | None:
    """The order of whole groups that `order` of columns is; None where it cuts one."""
    if len(order) % size:
        return None
    groups = order.reshape(-1, size)
    first = groups[:, 0]
    whole = np.array_equal(groups, first[:, None] + np.arange(size)) and not (first % size).any()
    return first // size if whole else None


def _groups(weight: PackedWeight, order: Tensor) -> PackedWeight:
    import torch

    words = torch.unflatten(weight.data, 1, (weight.scale.shape[1], -1))
    return replace(
        weight,
        data=words[:, order].flatten(1),
        scale=weight.scale[:, order],
        minimum=None if weight.minimum is None else weight.minimum[:, order],
    )
