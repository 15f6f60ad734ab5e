"""The header of one GGUF file: its metadata and where its tensors lie; needs no torch.

Read here and not by the gguf package, because `info` must say in one line what is wrong with a bad
file, whatever bytes it holds: nothing is allocated on a count's word before the file's size allows
it. Little-endian throughout:

    "GGUF", u32 version, u64 tensors, u64 pairs
    pairs:    key, u32 type, value           a string is u64 length + UTF-8
    tensors:  name, u32 dimensions, u64 sizes (fastest first), u32 type, u64 offset
    padding to `general.alignment`, from where offsets count
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_local.errors import CheckpointError
from clover_local.files import require_file
from clover_local.gguf.types import TYPES_BY_NUMBER, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in nothing that a little-endian reader sees
ALIGNMENT_KEY = "general.alignment"
TYPE_KEY = "general.type"
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4

STRING = 8
ARRAY = 9
BOOL = 7
_FLOAT32 = 6
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"),
    BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SMALLEST_PAIR = 8 + 4 + 1  # bytes: an empty key, its type, a value of one byte
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8

MetaValue = int | float | bool | str | list[str] | NDArray[np.generic]
"""A value: arrays of strings are lists, those of numbers are numpy's."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the header describes it: `shape` slowest first, `start` its byte in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """One file: its metadata, and its tensors in the order of the header.

    `array_starts` has the first byte in the file of each array of numbers among the metadata.
    """

    path: Path
    nbytes: int
    metadata: Mapping[str, MetaValue]
    tensors: tuple[GgufTensor, ...]
    array_starts: Mapping[str, int]


def read_file(path: Path) -> GgufFile:
    """The header of a GGUF file, checked against the file's size.

    Raises:
        CheckpointError: unreadable, truncated, or not a GGUF file that this runtime knows.
    """
    try:
        require_file(path)
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            if not nbytes:
                raise damaged(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Header(path, content).read()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None


def require_target(path: Path, kind: str) -> None:
    """Refuses to overwrite what is no file of `general.type` `kind`, such as a model of many GB.

    Raises:
        CheckpointError: there is another file, a folder, a pipe; or no folder for it.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: there is no folder {path.parent}, make it first")
    try:
        if not os.path.lexists(path) or read_file(path).metadata.get(TYPE_KEY) == kind:
            return
    except CheckpointError:
        pass  # whatever it is, it is none of ours
    raise CheckpointError(f"{path} exists and is another file: remove it or choose another name")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file whose bytes make no sense."""
    return CheckpointError(f"{path} is damaged ({what}): download it again")


class _Header:
    """A position in the file that moves on with every value; no value lies beyond the end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._at = 0
        self._array_starts: dict[str, int] = {}

    def read(self) -> GgufFile:
        magic = self._take(4, "its magic")
        if magic != MAGIC:
            raise CheckpointError(
                f"{self._path} is no GGUF file (it begins with {magic!r}): pass a .gguf file"
            )
        version = self._integer(4)
        if version not in VERSIONS:
            raise CheckpointError(f"{self._path} {_version_complaint(version)}")
        tensors, pairs = self._integer(8), self._integer(8)
        self._require_room(pairs, _SMALLEST_PAIR, "metadata pairs")
        self._require_room(tensors, _SMALLEST_TENSOR, "tensors")
        metadata: dict[str, MetaValue] = {}
        for _ in range(pairs):
            key = self._string("a key")
            if key in metadata:
                raise damaged(self._path, f"the key {shown(key)} is there twice")
            metadata[key] = self._value(key)
        entries = [self._entry() for _ in range(tensors)]
        start = aligned(self._at, self._alignment(metadata))
        placed = self._placed(entries, start)
        return GgufFile(self._path, self._size, metadata, placed, self._array_starts)

    def _value(self, key: str) -> MetaValue:
        kind = self._integer(4)
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise damaged(self._path, f"{shown(key)} has the unknown type {kind}")
        dtype = SCALARS[kind]
        number = np.frombuffer(self._take(dtype.itemsize, key), dtype)[0]
        # The shortest decimal that float32 rounds to this: 0.95 was written, not 0.949999988.
        value: int | float | bool = float(str(number)) if kind == _FLOAT32 else number.item()
        return value

    def _array(self, key: str) -> list[str] | NDArray[np.generic]:
        kind, count = self._integer(4), self._integer(8)
        if kind == STRING:
            self._require_room(count, 8, f"strings in {shown(key)}")
            return [self._string(key) for _ in range(count)]
        if kind not in SCALARS:
            what = "arrays" if kind == ARRAY else f"the unknown type {kind}"
            raise damaged(self._path, f"{shown(key)} is an array of {what}")
        dtype = SCALARS[kind]
        self._require_room(count, dtype.itemsize, f"numbers in {shown(key)}")
        self._array_starts[key] = self._at
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)

    def _entry(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        dimensions = self._integer(4)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise damaged(self._path, f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(self._integer(8) for _ in range(dimensions))[::-1]
        number, offset = self._integer(4), self._integer(8)
        if number not in TYPES_BY_NUMBER:
            raise CheckpointError(
                f"{self._path}: {shown(name)} has the type {number}, which this runtime does not "
                "know: use a file of another type, such as Q4_K_M or Q8_0"
            )
        return name, TYPES_BY_NUMBER[number], shape, offset

    def _placed(
        self, entries: list[tuple[str, TensorType, tuple[int, ...], int]], start: int
    ) -> tuple[GgufTensor, ...]:
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise damaged(self._path, f"the tensor {shown(name)} is there twice")
            if not all(shape) or shape[-1] % kind.block or prod(shape) >= 1 << 63:
                raise damaged(self._path, f"{shown(name)} is {kind.name} {list(shape)}")
            nbytes = prod(shape[:-1]) * kind.row_bytes(shape[-1])
            end = start + offset + nbytes
            if end > self._size:
                raise damaged(
                    self._path,
                    f"truncated, {shown(name)} would end at byte {end} of {self._size}",
                )
            tensors[name] = GgufTensor(name, kind, shape, self._path, start + offset, nbytes)
        end, last = start, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise damaged(self._path, f"{shown(tensor.name)} overlaps {shown(last)}")
            end, last = tensor.start + tensor.nbytes, tensor.name
        return tuple(tensors.values())

    def _alignment(self, metadata: Mapping[str, MetaValue]) -> int:
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise damaged(self._path, f"{ALIGNMENT_KEY} is {alignment!r:.40}")
        return alignment

    def _string(self, what: str) -> str:
        length = self._integer(8)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise damaged(self._path, f"{shown(what)} is not UTF-8") from None

    def _integer(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes, "its header"), "little")

    def _take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self._size - self._at:
            raise damaged(self._path, f"truncated, {shown(what)} does not end in the file")
        self._at += nbytes
        return self._content[self._at - nbytes : self._at]

    def _require_room(self, count: int, smallest: int, what: str) -> None:
        if count > (self._size - self._at) // smallest:
            raise damaged(self._path, f"{count} {what} in a file of {self._size} bytes")


def aligned(position: int, alignment: int) -> int:
    """The first multiple of `alignment` from `position` on."""
    return -(-position // alignment) * alignment


def shown(name: str) -> str:
    """A name from a file, for an error of one line."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _version_complaint(version: int) -> str:
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        return "is big-endian, which this runtime does not read: use the little-endian file"
    if version < min(VERSIONS):
        return (
            f"has GGUF version {version}, this runtime reads {VERSIONS[0]} and {VERSIONS[1]}: "
            "convert the model again with a current llama.cpp"
        )
    return (
        f"has GGUF version {version}, this runtime reads {VERSIONS[0]} and {VERSIONS[1]}: "
        "install a newer clover-local"
    )
