"""A packed matrix in the files: which tensors it is and what their shapes mean; needs no torch.

The names, shapes and dtypes are those of compressed-tensors' `pack-quantized`, but for the minima,
which stand for zero points that are no integers. N x K is the matrix.

    X.weight_packed      I32  [N, K * bits / 32]        words, in the bit order of `kernels/int4.py`
    X.weight_scale       BF16, F16 or F32  [N, K / group_size]
    X.weight_shape       I64 or I32  [2]: N, K
    X.weight_zero_point  I32  [ceil(N * bits / 32), K / group_size], packed along N
    X.weight_min         F32  [N, K / group_size]

Bits and group size are never taken on trust from `config.json`: K is known, so shapes say them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from clover_local.checkpoint.shards import TensorInfo

WORDS = "_packed"
SCALE = "_scale"
SHAPE = "_shape"
ZERO_POINT = "_zero_point"
MINIMUM = "_min"
PARTS = (WORDS, SCALE, SHAPE, ZERO_POINT, MINIMUM)

BITS = (4, 8)
WORD_BITS = 32
FLOAT_DTYPES = ("BF16", "F16", "F32")
GPU_GROUP = 32  # the smallest group that the GPU's kernels take


class Misfit(ValueError):
    """A packed matrix whose tensors contradict each other or the config; says how."""


@dataclass(frozen=True)
class PackedFormat:
    """How a matrix is packed: what tells `PackedWeight`s apart that cannot be stacked."""

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str


def format_on(layout: PackedFormat, device: str) -> PackedFormat:
    """The format as it runs on `cpu` or `cuda`, where `regroup.py` may make another."""
    if device == "cpu" or layout.group_size % GPU_GROUP == 0:
        return layout
    return PackedFormat(8, GPU_GROUP, symmetric=True, scale_dtype="F32")


@dataclass(frozen=True)
class PackedInfo:
    """The tensors of one packed matrix; it lies where its words lie."""

    words: TensorInfo
    scale: TensorInfo
    shape: TensorInfo
    zero_point: TensorInfo | None
    minimum: TensorInfo | None
    format: PackedFormat

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        parts = (self.words, self.scale, self.shape, self.zero_point, self.minimum)
        return tuple(part for part in parts if part is not None)

    @property
    def name(self) -> str:
        """The name that the unquantized matrix would have."""
        return self.words.name.removesuffix(WORDS)

    @property
    def shard(self) -> Path:
        """The file that holds the words."""
        return self.words.shard

    @property
    def start(self) -> int:
        """The words' first byte in the file."""
        return self.words.start

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)


def match_packed(
    name: str, tensors: Mapping[str, TensorInfo], *, shape: tuple[int, ...]
) -> PackedInfo:
    """The packed matrix that stands for `name` (`X.weight`), of `shape` by the config.

    Args:
        tensors: by name; `name + "_packed"` is among them.

    Raises:
        Misfit: a part is missing or has a dtype or shape that does not fit the others.
    """
    words, scale, shape_info, zero_point, minimum = (tensors.get(name + part) for part in PARTS)
    if words is None or scale is None or shape_info is None:
        absent = [name + part for part in (WORDS, SCALE, SHAPE) if name + part not in tensors]
        raise Misfit(f"{name}{WORDS} lacks {' and '.join(absent)}")
    if zero_point is not None and minimum is not None:
        raise Misfit(f"{name} has both {ZERO_POINT[1:]} and {MINIMUM[1:]}")
    rows, columns = shape
    bits = _bits(words, rows, columns)
    groups = scale.shape[-1] if scale.shape else 0
    if scale.dtype not in FLOAT_DTYPES or scale.shape != (rows, groups) or not groups:
        raise Misfit(f"{described(scale)}, expected floats [{rows}, groups]")
    if columns % groups:
        raise Misfit(f"{described(scale)}: {columns} columns are not {groups} equal groups")
    if shape_info.dtype not in ("I64", "I32") or shape_info.shape != (2,):
        raise Misfit(f"{described(shape_info)}, expected I64 [2]")
    if zero_point is not None:
        require(zero_point, "I32", (ceil(rows * bits / WORD_BITS), groups))
    if minimum is not None:
        require(minimum, "F32", (rows, groups))
    symmetric = zero_point is None and minimum is None
    layout = PackedFormat(bits, columns // groups, symmetric, scale.dtype)
    return PackedInfo(words, scale, shape_info, zero_point, minimum, layout)


def _bits(words: TensorInfo, rows: int, columns: int) -> int:
    shapes = {
        (rows, columns * bits // WORD_BITS): bits
        for bits in BITS
        if columns * bits % WORD_BITS == 0
    }
    if words.dtype != "I32" or words.shape not in shapes:
        expected = " or ".join(f"I32 {list(shape)} ({bits} bits)" for shape, bits in shapes.items())
        raise Misfit(f"{described(words)}, expected {expected or 'no packed matrix'}")
    return shapes[words.shape]


def require(tensor: TensorInfo, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises Misfit where a tensor has another dtype or shape."""
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise Misfit(f"{described(tensor)}, expected {dtype} {list(shape)}")


def described(tensor: TensorInfo) -> str:
    """Name, dtype and shape, for a complaint."""
    return f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}"
