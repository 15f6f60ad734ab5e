"""Waves by Triton's kernels, which leave out experts that are in no slot; loaded where they run."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clover_local.kernels.dispatch import AnyRouting, sorted_routing
from clover_local.kernels.gpu.experts.int4_experts import expert_results
from clover_local.kernels.gpu.experts.record import ExpertSlots, RecordLayout
from clover_local.residency.demand import IntArray

NOWHERE = -1
_UNKNOWN = -2


class SlotMaps:
    """slot_of_expert [E] of each layer on the device, sent there only where it has changed.

    A kernel reads the entries of experts that rows use and no others: those are right.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, *, device: torch.device) -> None:
        self._row = {layer: row for row, layer in enumerate(layers)}
        shape = (len(layers), num_experts)
        self._maps = torch.full(shape, NOWHERE, dtype=torch.int32, device=device)
        self._sent = np.full(shape, NOWHERE, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._maps.nbytes

    def of(self, layer: int, experts: IntArray, *, slots: IntArray) -> Tensor:
        """The map [E] int32 of a layer in which `experts` are in `slots`; -1: left out."""
        row = self._row[layer]
        if not np.array_equal(self._sent[row, experts], slots):
            wanted = self._sent[row].copy()
            wanted[wanted == _UNKNOWN] = NOWHERE
            wanted[experts] = slots
            self._sent[row] = _UNKNOWN  # until it is there
            content = torch.tensor(wanted, pin_memory=self._maps.is_cuda)
            self._maps[row].copy_(content, non_blocking=True)
            self._sent[row] = wanted
        return self._maps[row]


def compute_records(
    x: Tensor,
    routing: AnyRouting,
    *,
    records: Tensor,
    layout: RecordLayout,
    slot_of_expert: Tensor,
    results: Tensor,
) -> None:
    """The experts that are in slots, by the grouped kernels.

    Args:
        x: [T, D].
        routing: of these rows, sorted by expert.
        records: [slots, at least the layout's bytes] uint8.
        layout: of every record.
        slot_of_expert: [E] int32, -1: left out.
        results: [T, A, D] float32: the experts' places are written.
    """
    slots = ExpertSlots(records, layout, slot_of_expert)
    expert_results(x, sorted_routing(routing), slots=slots, results=results)
