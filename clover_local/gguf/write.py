"""A GGUF file's header from metadata and tensor sizes: every byte's place is known from the start.

So tensors can be written one by one, and an interrupted file continued. Padding is zeros.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from clover_local.gguf.container import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MOST_DIMENSIONS,
    SCALARS,
    STRING,
    VERSIONS,
    MetaValue,
    aligned,
)
from clover_local.gguf.types import TensorType

_KINDS = {dtype: kind for kind, dtype in SCALARS.items()}
_INTEGER = 4  # u32, what llama.cpp reads sizes and ids as
_NEGATIVE = 11  # i64
_FLOAT = 6


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that the file will hold; `shape` slowest first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


@dataclass(frozen=True)
class Layout:
    """The header's bytes, and each tensor's first byte in the file."""

    header: bytes
    starts: tuple[int, ...]
    nbytes: int


def lay_out(metadata: Mapping[str, MetaValue], tensors: Sequence[PlannedTensor]) -> Layout:
    """The file's header and where the tensors lie behind it, in the order given.

    Integers are stored as u32 (negative ones as i64) and floats as float32; arrays in the type that
    they have.

    Raises:
        ValueError: a name that occurs twice, a value or shape that the format does not have.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ValueError("two tensors have one name")
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += aligned(tensor.nbytes, DEFAULT_ALIGNMENT)
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    parts += [_string(key) + _value(key, value) for key, value in metadata.items()]
    parts += [_entry(*pair) for pair in zip(tensors, offsets, strict=True)]
    header = b"".join(parts)
    header += bytes(-len(header) % DEFAULT_ALIGNMENT)
    return Layout(header, tuple(len(header) + offset for offset in offsets), len(header) + end)


def _entry(tensor: PlannedTensor, offset: int) -> bytes:
    dimensions = len(tensor.shape)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"{tensor.name} has {dimensions} dimensions, 1 to {MOST_DIMENSIONS} fit")
    sizes = tensor.shape[::-1]
    return _string(tensor.name) + struct.pack(
        f"<I{dimensions}QIQ", dimensions, *sizes, tensor.type.number, offset
    )


def _string(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def _value(key: str, value: MetaValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int) and value < 0:
        return struct.pack("<Iq", _NEGATIVE, value)
    if isinstance(value, int):
        return struct.pack("<II", _INTEGER, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype not in _KINDS:
            raise ValueError(f"{key} is an array of {value.dtype} with {value.ndim} axes")
        head = struct.pack("<IIQ", ARRAY, _KINDS[value.dtype], len(value))
        return head + value.tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
