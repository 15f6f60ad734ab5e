"""An expert's record: its six or nine parts one after the other, each at a multiple of 256 bytes.

    gate packed | up packed | gate scale | up scale | down packed | down scale | minima, if any

The order of the bytes in a checkpoint, so that an expert is loaded by one copy. A slot is the place
of one record on the device; kernels are told the slot of each expert, never a record's address.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.kernels.packed import PackedWeight

ALIGNMENT = 256


@dataclass(frozen=True)
class MatrixFormat:
    """How a matrix is packed; the words are those of `PackedWeight`."""

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    has_minimum: bool


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a record lie, in bytes."""

    hidden: int  # D
    inner: int  # F
    gate_up: MatrixFormat  # gate and up are [F, D]
    down: MatrixFormat  # [D, F]
    gate_packed: int
    up_packed: int
    gate_scale: int
    up_scale: int
    down_packed: int
    down_scale: int
    gate_minimum: int | None
    up_minimum: int | None
    down_minimum: int | None
    nbytes: int


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Experts of a layer that are on the device."""

    records: Tensor  # [slots, nbytes] uint8
    layout: RecordLayout
    slot_of_expert: Tensor  # [E] int32; -1: not here, its rows are left out and nothing is read


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment: where the part behind so many bytes starts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def format_of(weight: PackedWeight) -> MatrixFormat:
    """The format of a weight."""
    return MatrixFormat(
        weight.bits, weight.group_size, weight.scale.dtype, weight.minimum is not None
    )


def record_layout(
    hidden: int, inner: int, *, gate_up: MatrixFormat, down: MatrixFormat
) -> RecordLayout:
    """The layout of a record of gate and up [inner, hidden] and down [hidden, inner].

    Raises:
        ValueError: groups that do not divide the columns.
    """
    for columns, matrix in ((hidden, gate_up), (inner, down)):
        if columns % matrix.group_size:
            raise ValueError(f"groups of {matrix.group_size} do not divide {columns} columns")
    groups = {"gate_up": hidden // gate_up.group_size, "down": inner // down.group_size}
    end = 0

    def part(nbytes: int) -> int:
        nonlocal end
        start, end = end, end + aligned(nbytes)
        return start

    gate_packed = part(inner * hidden * gate_up.bits // 8)
    up_packed = part(inner * hidden * gate_up.bits // 8)
    gate_scale = part(inner * groups["gate_up"] * gate_up.scale_dtype.itemsize)
    up_scale = part(inner * groups["gate_up"] * gate_up.scale_dtype.itemsize)
    down_packed = part(hidden * inner * down.bits // 8)
    down_scale = part(hidden * groups["down"] * down.scale_dtype.itemsize)
    minima = gate_up.has_minimum
    gate_minimum = part(4 * inner * groups["gate_up"]) if minima else None
    up_minimum = part(4 * inner * groups["gate_up"]) if minima else None
    down_minimum = part(4 * hidden * groups["down"]) if down.has_minimum else None
    return RecordLayout(
        hidden=hidden,
        inner=inner,
        gate_up=gate_up,
        down=down,
        gate_packed=gate_packed,
        up_packed=up_packed,
        gate_scale=gate_scale,
        up_scale=up_scale,
        down_packed=down_packed,
        down_scale=down_scale,
        gate_minimum=gate_minimum,
        up_minimum=up_minimum,
        down_minimum=down_minimum,
        nbytes=end,
    )


def resident_slots(
    gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]
) -> ExpertSlots | None:
    """All experts of a layer, each in the slot of its number: a copy on their device.

    Args:
        gate_up: of each expert [2F, D], gate first.
        down: of each expert [D, F].

    Returns:
        None where formats differ from expert to expert.
    """
    formats = {
        (format_of(first), format_of(second)) for first, second in zip(gate_up, down, strict=True)
    }
    if len(formats) != 1:
        return None
    (hidden, inner), device = down[0].shape, down[0].data.device
    layout = record_layout(hidden, inner, gate_up=format_of(gate_up[0]), down=format_of(down[0]))
    records = torch.zeros(len(down), layout.nbytes, dtype=torch.uint8, device=device)
    for record, first, second in zip(records, gate_up, down, strict=True):
        write_record(record, layout, gate_up=first, down=second)
    return ExpertSlots(records, layout, torch.arange(len(down), dtype=torch.int32, device=device))


def write_record(
    record: Tensor, layout: RecordLayout, *, gate_up: PackedWeight, down: PackedWeight
) -> None:
    """Writes an expert's matrices, gate_up [2F, D] with gate first and down [D, F], as a record.

    Args:
        record: [nbytes] uint8; bytes between the parts stay as they are.

    Raises:
        ValueError: shapes or formats that are not the layout's.
    """
    hidden, inner = layout.hidden, layout.inner
    for name, weight, shape, expected in (
        ("gate_up", gate_up, (2 * inner, hidden), layout.gate_up),
        ("down", down, (hidden, inner), layout.down),
    ):
        if weight.shape != shape or format_of(weight) != expected:
            raise ValueError(
                f"{name} is {weight.shape} in {format_of(weight)}, not {shape} in {expected}"
            )
    if record.shape != (layout.nbytes,) or record.dtype != torch.uint8:
        raise ValueError(
            f"the record is {tuple(record.shape)} {record.dtype}, not {layout.nbytes} bytes"
        )
    parts: list[tuple[int | None, Tensor | None]] = [
        (layout.gate_packed, gate_up.data[:inner]),
        (layout.up_packed, gate_up.data[inner:]),
        (layout.gate_scale, gate_up.scale[:inner]),
        (layout.up_scale, gate_up.scale[inner:]),
        (layout.down_packed, down.data),
        (layout.down_scale, down.scale),
        (layout.gate_minimum, None if gate_up.minimum is None else gate_up.minimum[:inner]),
        (layout.up_minimum, None if gate_up.minimum is None else gate_up.minimum[inner:]),
        (layout.down_minimum, down.minimum),
    ]
    for start, part in parts:
        if start is not None and part is not None:
            record[start : start + part.nbytes] = part.contiguous().view(torch.uint8).flatten()
