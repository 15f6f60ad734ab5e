"""An importance matrix: the mean square of each input of each matrix, in llama.cpp's GGUF form.

    NAME.in_sum2   float32 [matrices, columns]   sums of squares; a matrix for each expert
    NAME.counts    float32 [matrices, 1]         rows that were summed

NAME is the tensor's name in a GGUF model, and columns are in that file's order. A matrix that no
row has reached gets 1.0 everywhere, so that it is quantized as if there were no importance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clover_local.errors import CheckpointError
from clover_local.gguf.container import TYPE_KEY, GgufTensor, MetaValue, read_file
from clover_local.gguf.types import TYPES
from clover_local.gguf.write import PlannedTensor, lay_out

TYPE = "imatrix"
SUMS, COUNTS = ".in_sum2", ".counts"

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Sums:
    """Of one tensor: sums of squares [matrices, columns] and rows summed [matrices]."""

    squares: Floats
    counts: Floats

    @property
    def importance(self) -> Floats:
        """[matrices, columns]: means, 1.0 where nothing was summed.

        An input that was always 0 counts as the least important one: a block of nothing but zeros
        would make ggml write zeros for its weights, whatever they are.
        """
        seen = self.counts > 0
        counts = np.where(seen, self.counts, 1)
        means = np.where(seen[:, None], self.squares / counts[:, None], 1).astype(np.float32)
        positive = np.where(means > 0, means, np.inf).min(1, keepdims=True)
        least = np.where(np.isfinite(positive), positive, 1)
        return np.where(means > 0, means, least).astype(np.float32)


def imatrix_bytes(sums: Mapping[str, Sums], *, dataset: str, chunks: int, chunk_size: int) -> bytes:
    """The file: what llama-quantize reads."""
    metadata: dict[str, MetaValue] = {
        TYPE_KEY: TYPE,
        "imatrix.datasets": [dataset],
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_size,
    }
    arrays = {
        name + part: array
        for name in sorted(sums)
        for part, array in (
            (SUMS, sums[name].squares),
            (COUNTS, sums[name].counts.reshape(-1, 1)),
        )
    }
    planned = [PlannedTensor(name, TYPES["F32"], array.shape) for name, array in arrays.items()]
    layout = lay_out(metadata, planned)
    content = bytearray(layout.nbytes)
    content[: len(layout.header)] = layout.header
    for start, array in zip(layout.starts, arrays.values(), strict=True):
        content[start : start + array.nbytes] = np.ascontiguousarray(array, "<f4").tobytes()
    return bytes(content)


def read_imatrix(path: Path) -> dict[str, Sums]:
    """The sums by tensor name.

    Raises:
        CheckpointError: a bad file, none of this kind, or numbers that are none.
    """
    file = read_file(path)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if file.metadata.get(TYPE_KEY) != TYPE:
        raise CheckpointError(
            f"{path} is no imatrix: make one with `clover-local imatrix CHECKPOINT OUT.gguf`"
        )
    sums = {}
    for name in [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]:
        squares = _numbers(path, tensors[name + SUMS])
        counts = _numbers(path, tensors.get(name + COUNTS)).ravel()
        if squares.ndim != 2 or len(counts) not in (1, len(squares)):
            raise _bad(path, f"{name} has {len(counts)} counts for {list(squares.shape)}")
        sums[name] = Sums(squares, np.broadcast_to(counts, len(squares)))
        if not np.isfinite(squares).all() or not np.isfinite(counts).all() or squares.min() < 0:
            raise _bad(path, f"{name} holds what is no sum of squares")
    return sums


def _numbers(path: Path, tensor: GgufTensor | None) -> Floats:
    if tensor is None or tensor.type.name != "F32":
        raise _bad(path, "a tensor of sums without counts, or not float32")
    with path.open("rb") as file:
        file.seek(tensor.start)
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        return np.frombuffer(file.read(tensor.nbytes), "<f4").reshape(-1, shape[-1])


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({what}): make it again")
