"""A checkpoint's parameters as the float32 rows that a GGUF file wants, a few at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.checkpoint.parameters import PARAMETERS
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.checkpoint.read import read_tensor, read_weight
from clover_local.checkpoint.shards import TensorInfo
from clover_local.config import GenerationConfig, ModelConfig
from clover_local.errors import CheckpointError
from clover_local.gguf.tensors import Heads, NamedEntry, Value
from clover_local.kernels.packed import Weight
from clover_local.tokenizer import Tokenizer

PIECE_NUMBERS = 1 << 22  # 16 MiB of float32; an expert may be larger

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Source:
    """A model to export: all but its weights, and where those lie."""

    name: str
    checkpoint: Checkpoint
    config: ModelConfig
    generation: GenerationConfig
    tokenizer: Tokenizer

    def parameter(self, name: str) -> Floats:
        """A small parameter, by its name without prefix."""
        (part,) = self.checkpoint.parts[name, None]
        return self._finite(name, _floats(read_weight(part)))

    def pieces(self, named: NamedEntry) -> Iterator[Floats]:
        """The rows [R, columns] of a GGUF tensor, in order: an expert, or some rows, at a time.

        Raises:
            CheckpointError: a file cannot be read, or holds NaN or infinity.
        """
        for piece in self._pieces(named):
            yield self._finite(named.parameter, piece)

    def _pieces(self, named: NamedEntry) -> Iterator[Floats]:
        if named.entry.of_experts:
            for expert in range(self.config.num_experts):
                yield self._expert(named, expert)
            return
        (part,) = self.checkpoint.parts[named.parameter, None]
        columns = named.shape[-1]
        step = max(1, PIECE_NUMBERS // columns)
        tensor = part.tensor
        if isinstance(tensor, TensorInfo) and len(named.shape) == 2 and not _changes(named):
            for row in range(0, named.shape[0], step):
                rows = min(step, named.shape[0] - row)
                yield _floats(read_tensor(tensor, start_row=row, rows=rows)).reshape(rows, columns)
            return
        values = self._changed(named, _floats(read_weight(part)).reshape(-1, columns))
        for row in range(0, len(values), step):
            yield values[row : row + step]

    def _expert(self, named: NamedEntry, expert: int) -> Floats:
        parts = self.checkpoint.parts
        kind = PARAMETERS[named.entry.parameter]
        first, rows = kind.first_row(self.config), named.shape[1]
        fused = parts.get((named.parameter, None))
        if fused is not None:
            return _floats(_rows_of_fused(fused[0], expert, first=first, rows=rows))
        return _rows_of(parts[named.parameter, expert], first=first, rows=rows)

    def _changed(self, named: NamedEntry, values: Floats) -> Floats:
        """Heads in the file's order, then the file's values."""
        heads, order = named.entry.heads, named.entry.order(self.config)
        if order is not None and len(named.shape) == 1:
            values = values[:, order]
        elif order is not None:
            values = values[:, order] if heads is Heads.COLUMNS else values[order]
        if named.entry.value is Value.PLUS_ONE:
            return values + np.float32(1)
        if named.entry.value is Value.MINUS_EXP:
            return (-np.exp(values.astype(np.float64))).astype(np.float32)
        return values

    def _finite(self, name: str, values: Floats) -> Floats:
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.checkpoint.folder}: {name} holds NaN or infinity: download it again"
            )
        return values


def _changes(named: NamedEntry) -> bool:
    return named.entry.heads is not Heads.NONE or named.entry.value is not Value.SAME


def _rows_of_fused(placement: Placement, expert: int, *, first: int, rows: int) -> Weight:
    tensor = placement.tensor
    if not isinstance(tensor, TensorInfo):
        raise ValueError(f"{tensor.name} is no plain tensor")
    experts, rows_each, columns = tensor.shape
    flat = replace(tensor, shape=(experts * rows_each, columns))
    return read_tensor(flat, start_row=expert * rows_each + first, rows=rows)


def _rows_of(parts: Sequence[Placement], *, first: int, rows: int) -> Floats:
    """`rows` rows from `first` on of an expert's parts: one of them, or rows of the only one."""
    for part in parts:
        start = part.target.first_row
        if start <= first < start + part.target.shape[0]:
            return _floats(read_weight(part))[first - start : first - start + rows]
    raise ValueError(f"no part has row {first}")


def _floats(weight: Weight) -> Floats:
    plain = weight if isinstance(weight, Tensor) else weight.dequantize()
    values: Floats = plain.to(torch.float32).numpy()
    return values
