"""The slots of one size of record: memory on the device, and whose record is really in each.

The slot table says who is to be where; what happened is written down here, record by record, and
only once a copy is made. So a failed read or an interrupt leaves no slot that claims a record which
is not in it: what the table believes and this does not is copied again when it is asked for.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from clover_local.experts.record import Layout, weights_of
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import ExpertMatrices
from clover_local.kernels.packed import Weight
from clover_local.residency.demand import IntArray

EMPTY = -1

Matrices = tuple[ExpertMatrices, ExpertMatrices, IntArray]
"""Matrices gate_up and down, and which of them are those of the slots that were asked for."""


class Slots(Protocol):
    """Places for records."""

    holds: IntArray
    """[slots]: the key of the expert whose record is there, EMPTY: none that is whole."""

    @property
    def nbytes(self) -> int:
        """Bytes that the slots take when all are filled."""

    def put(self, slot: int, key: int, layout: Layout, *, read: Callable[[Tensor], None]) -> None:
        """Fills a slot with the record that `read` writes; for slots in host memory."""

    def matrices(self, slots: IntArray, layout: Layout) -> Matrices:
        """The experts of some slots, whose records are joined and have this layout."""
        ...

    def resize(self, count: int, moves: IntArray) -> None:
        """Another number of slots.

        Args:
            count: of slots.
            moves: [n, 2]: from a slot that is gone to one that is free.

        Raises:
            torch.OutOfMemoryError: no room; there is no slot any more.
        """


class RecordSlots:
    """Records in one tensor, on any device."""

    def __init__(
        self,
        count: int,
        record_bytes: int,
        *,
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.empty,
    ) -> None:
        """`allocate` is called as `torch.empty`.

        Raises:
            torch.OutOfMemoryError: no room on the device.
        """
        self._record_bytes, self._device, self._allocate = record_bytes, device, allocate
        self._matrices: dict[Layout, tuple[ExpertMatrices, ExpertMatrices]] = {}
        self.holds = np.full(count, EMPTY)
        self.records = self._empty(count)

    @property
    def nbytes(self) -> int:
        """See `Slots`."""
        return self.records.nbytes

    def put(self, slot: int, key: int, layout: Layout, *, read: Callable[[Tensor], None]) -> None:
        """See `Slots`."""
        self.holds[slot] = EMPTY
        read(self.records[slot])
        self.holds[slot] = key

    def matrices(self, slots: IntArray, layout: Layout) -> Matrices:
        """See `Slots`."""
        if layout not in self._matrices:
            weights = [weights_of(record, layout) for record in self.records]
            gate_up, down = (ExpertMatrices(half) for half in zip(*weights, strict=True))
            self._matrices[layout] = gate_up, down
        return *self._matrices[layout], slots

    def resize(self, count: int, moves: IntArray) -> None:
        """See `Slots`. Where old and new do not fit together, what the slots hold is lost."""
        self._matrices.clear()
        holds = np.full(count, EMPTY)
        try:
            records = self._empty(count)
        except torch.OutOfMemoryError:
            self.records, self.holds = self._empty(0), np.full(0, EMPTY)  # frees the old ones
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self.records, self.holds = self._empty(count), holds
            return
        same = min(count, len(self.holds))
        records[:same], holds[:same] = self.records[:same], self.holds[:same]
        for source, target in moves[moves[:, 0] < len(self.holds)].tolist():
            records[target], holds[target] = self.records[source], self.holds[source]
        self.records, self.holds = records, holds

    def _empty(self, count: int) -> Tensor:
        return self._allocate((count, self._record_bytes), dtype=torch.uint8, device=self._device)


class MatrixSlots:
    """Records whose large plain matrices are kept in another layout, for a CPU.

    Each slot has matrices of its own, made when it is filled, as `ResidentExperts` has them.
    """

    def __init__(self, count: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._weights: list[tuple[Weight, Weight] | None] = [None] * count
        self.holds = np.full(count, EMPTY)

    @property
    def nbytes(self) -> int:
        """See `Slots`."""
        return len(self.holds) * self._record_bytes

    def put(self, slot: int, key: int, layout: Layout, *, read: Callable[[Tensor], None]) -> None:
        """See `Slots`."""
        self.holds[slot] = EMPTY
        self._weights[slot] = None
        record = torch.empty(layout.nbytes, dtype=torch.uint8)
        read(record)
        gate_up, down = weights_of(record, layout)
        self._weights[slot] = dispatch.blocked_weight(gate_up), dispatch.blocked_weight(down)
        self.holds[slot] = key

    def matrices(self, slots: IntArray, layout: Layout) -> Matrices:
        """See `Slots`."""
        pairs = [pair for slot in slots.tolist() if (pair := self._weights[slot]) is not None]
        gate_up, down = (ExpertMatrices(half) for half in zip(*pairs, strict=True))
        return gate_up, down, np.arange(len(slots))

    def resize(self, count: int, moves: IntArray) -> None:
        """See `Slots`."""
        weights: list[tuple[Weight, Weight] | None] = [None] * count
        holds = np.full(count, EMPTY)
        same = min(count, len(self.holds))
        weights[:same], holds[:same] = self._weights[:same], self.holds[:same]
        for source, target in moves.tolist():
            weights[target], holds[target] = self._weights[source], self.holds[source]
        self._weights, self.holds = weights, holds


def are_blocked(layout: Layout, *, device: torch.device) -> bool:
    """Whether plain matrices of such records get another layout on this device."""
    if device.type != "cpu":
        return False
    for field in layout.fields:
        rows, columns = field.shape
        if field.part == "values" and field.dtype == torch.float32:
            joined = 2 if field.matrix == "gate" else 1
            if dispatch.blocked_tensor(torch.zeros(joined * rows, columns)).is_mkldnn:
                return True
    return False
