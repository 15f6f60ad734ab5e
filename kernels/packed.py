"""weight[n, k] = value[n, k] * scale[n, g] or stored[n, k] * scale[n, g] + minimum[n, g].

g = k // group_size; `value` is signed, `stored` = value + 2^(bits - 1) is what the words hold. The
one quantized weight that the runtime knows: every loader makes it, linear maps and experts take it.
Plain tensors are the unquantized ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clover_local.kernels.int4 import BITS, WORD_BITS, unpack

ALIGNMENT = 16
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] of 4- or 8-bit integers with a scale for each group of columns.

    Symmetric (value * scale) without `minimum`, else stored * scale + minimum.
    """

    data: Tensor  # [N, K * bits / 32] int32, the bit order of `int4.py`
    scale: Tensor  # [N, K / group_size] bfloat16, float16 or float32
    minimum: Tensor | None  # [N, K / group_size] float32: the weight where 0 is stored; or None
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        """Checks that the parts fit each other.

        Raises:
            ValueError: wrong dtypes or shapes; says both numbers.
        """
        if self.bits not in BITS:
            raise ValueError(f"{self.bits} bits, the widths are 4 and 8")
        if self.data.dtype != torch.int32 or self.scale.dtype not in SCALE_DTYPES:
            raise ValueError(f"data are {self.data.dtype}, scales {self.scale.dtype}")
        rows, columns = self.shape
        groups = columns // self.group_size if self.group_size > 0 else 0
        if groups * self.group_size != columns or self.scale.shape != (rows, groups):
            raise ValueError(
                f"scales are {tuple(self.scale.shape)} for a weight of {(rows, columns)} in groups "
                f"of {self.group_size}"
            )
        if self.minimum is not None and (
            self.minimum.dtype != torch.float32 or self.minimum.shape != self.scale.shape
        ):
            raise ValueError(
                f"minima are {self.minimum.dtype} {tuple(self.minimum.shape)}, "
                f"scales {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.data.shape[0], self.data.shape[1] * WORD_BITS // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.data.nbytes + self.scale.nbytes + minimum

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on another device; on its own device nothing is copied."""
        return replace(
            self,
            data=self.data.to(device),
            scale=self.scale.to(device),
            minimum=None if self.minimum is None else self.minimum.to(device),
        )

    def rows(self, chosen: slice | Tensor) -> "PackedWeight":
        """Some rows: views where a slice chooses them."""
        minimum = None if self.minimum is None else self.minimum[chosen]
        return replace(self, data=self.data[chosen], scale=self.scale[chosen], minimum=minimum)

    def aligned(self) -> "PackedWeight":
        """The same weight with parts that start at multiples of 16 bytes: copies where they do not.

        What was just copied to a device does; a view of a file's memory map need not.
        """

        def part(x: Tensor) -> Tensor:
            return x.clone() if x.data_ptr() % ALIGNMENT else x

        minimum = None if self.minimum is None else part(self.minimum)
        return replace(self, data=part(self.data), scale=part(self.scale), minimum=minimum)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32: the definition of what is stored."""
        values = torch.unflatten(unpack(self.data, self.bits).float(), 1, (-1, self.group_size))
        scale = self.scale.float()[..., None]  # [N, G, 1]
        if self.minimum is None:
            return (values * scale).flatten(1)
        stored = values + (1 << (self.bits - 1))
        return (stored * scale + self.minimum[..., None]).flatten(1)


Weight = Tensor | PackedWeight
"""A weight [N, K] as an operator takes it."""


def same_format(a: Weight, b: Weight) -> bool:
    """Whether two weights over the same inputs can be stacked into one."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    return (a.bits, a.group_size, a.scale.dtype, a.minimum is None) == (
        b.bits,
        b.group_size,
        b.scale.dtype,
        b.minimum is None,
    )


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of the same format and K, one below the other.

    Parts that already follow each other in memory, as the parts of an expert do in a memory map,
    become one view; others are copied.

    Raises:
        ValueError: the formats differ.
    """
    first = weights[0]
    if not all(same_format(first, weight) for weight in weights):
        raise ValueError("weights of different formats cannot be stacked")
    minima = [weight.minimum for weight in weights if weight.minimum is not None]
    return PackedWeight(
        _joined([weight.data for weight in weights]),
        _joined([weight.scale for weight in weights]),
        _joined(minima) if minima else None,
        first.bits,
        first.group_size,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[N1 + N2 + ..., C] from contiguous parts [Ni, C]: a view where they are neighbours."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.data_ptr() != end
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return torch.cat(list(parts))
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, first.shape[1]), first.stride())
