"""One expert as bytes in a slot: where its parts lie, and the weights that they are.

    gate values | up values | gate scale | up scale | down values | down scale | minima, if any

Values are packed words or plain numbers; what a matrix does not have is left out. Two layouts have
this order and one size. In the kernels' every part is aligned. In the joined one up follows gate
without a gap, so that both are one matrix of 2F rows; for shapes that are multiples of 256 bytes
the two are the same, and an expert that `quantize` wrote is copied by one read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from clover_local.kernels.gpu.experts.record import (
    MatrixFormat,
    RecordLayout,
    aligned,
    record_layout,
)
from clover_local.kernels.int4 import WORD_BITS
from clover_local.kernels.packed import PackedWeight, Weight

Matrix: TypeAlias = Literal["gate", "up", "down"]
Part: TypeAlias = Literal["values", "scale", "minimum"]


@dataclass(frozen=True)
class ExpertFormat:
    """How an expert is stored: packed matrices, or plain ones of a dtype."""

    hidden: int  # D
    inner: int  # F
    gate_up: MatrixFormat | torch.dtype  # gate and up are [F, D]
    down: MatrixFormat | torch.dtype  # [D, F]


@dataclass(frozen=True)
class Field:
    """A part of a matrix in a record."""

    matrix: Matrix
    part: Part
    start: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes, without what follows up to the next part."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def of(self, record: Tensor) -> Tensor:
        """The part of a record [nbytes] uint8: a view."""
        return record[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of a record; `kernel` is the same for Triton's kernels, where it is theirs."""

    format: ExpertFormat
    fields: tuple[Field, ...]
    nbytes: int
    kernel: RecordLayout | None = None

    def field(self, matrix: Matrix, part: Part) -> Field | None:
        """A field, where the record has it."""
        found = (field for field in self.fields if (field.matrix, field.part) == (matrix, part))
        return next(found, None)


def joined_layout(expert: ExpertFormat) -> Layout:
    """Gate and up as one matrix."""
    fields: list[Field] = []
    end = nbytes = 0
    for matrix, part, shape, dtype in _parts(expert):
        fields.append(Field(matrix, part, end if matrix == "up" else aligned(end), shape, dtype))
        end = fields[-1].start + fields[-1].nbytes
        nbytes += aligned(fields[-1].nbytes)
    return Layout(expert, tuple(fields), nbytes)


def kernel_layout(expert: ExpertFormat) -> Layout | None:
    """The layout of Triton's kernels; None where a matrix is not packed."""
    if not isinstance(expert.gate_up, MatrixFormat) or not isinstance(expert.down, MatrixFormat):
        return None
    fields: list[Field] = []
    end = 0
    for matrix, part, shape, dtype in _parts(expert):
        fields.append(Field(matrix, part, end, shape, dtype))
        end += aligned(fields[-1].nbytes)
    kernel = record_layout(expert.hidden, expert.inner, gate_up=expert.gate_up, down=expert.down)
    return Layout(expert, tuple(fields), end, kernel)


def weights_of(record: Tensor, layout: Layout) -> tuple[Weight, Weight]:
    """gate_up [2F, D] and down [D, F] of a record [nbytes] uint8 in the joined layout: views."""
    return (
        _weight(record, layout, "gate", layout.format.gate_up, matrices=2),
        _weight(record, layout, "down", layout.format.down, matrices=1),
    )


def _weight(
    record: Tensor,
    layout: Layout,
    matrix: Matrix,
    stored: MatrixFormat | torch.dtype,
    *,
    matrices: int,
) -> Weight:
    def view(part: Part) -> Tensor | None:
        field = layout.field(matrix, part)
        if field is None:
            return None
        content = record[field.start : field.start + matrices * field.nbytes].view(field.dtype)
        return content.view(matrices * field.shape[0], field.shape[1])

    values, scale = view("values"), view("scale")
    assert values is not None
    if not isinstance(stored, MatrixFormat):
        return values
    assert scale is not None
    return PackedWeight(values, scale, view("minimum"), stored.bits, stored.group_size)


def _parts(expert: ExpertFormat) -> Iterator[tuple[Matrix, Part, tuple[int, int], torch.dtype]]:
    """All parts in order."""
    shapes: dict[Matrix, tuple[int, int]] = {
        "gate": (expert.inner, expert.hidden),
        "up": (expert.inner, expert.hidden),
        "down": (expert.hidden, expert.inner),
    }
    halves: tuple[tuple[tuple[Matrix, ...], MatrixFormat | torch.dtype], ...] = (
        (("gate", "up"), expert.gate_up),
        (("down",), expert.down),
    )
    minima: list[tuple[Matrix, Part, tuple[int, int], torch.dtype]] = []
    for matrices, stored in halves:
        for matrix in matrices:
            rows, columns = shapes[matrix]
            if isinstance(stored, MatrixFormat):
                yield matrix, "values", (rows, columns * stored.bits // WORD_BITS), torch.int32
            else:
                yield matrix, "values", (rows, columns), stored
        if isinstance(stored, MatrixFormat):
            for matrix in matrices:
                rows, columns = shapes[matrix]
                groups = (rows, columns // stored.group_size)
                yield matrix, "scale", groups, stored.scale_dtype
                if stored.has_minimum:
                    minima.append((matrix, "minimum", groups, torch.float32))
    yield from minima
