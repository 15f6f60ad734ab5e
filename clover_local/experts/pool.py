"""The layers whose records have one size: their slot table, their slots, and how waves are run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from clover_local.experts.choices import Choices, compute_matrices
from clover_local.experts.copies import Copies, Copy, key_of
from clover_local.experts.slots import RecordSlots, Slots
from clover_local.experts.store import ExpertStore
from clover_local.experts.traffic import Traffic
from clover_local.kernels.dispatch import AnyRouting
from clover_local.kernels.gpu.experts.record import RecordLayout
from clover_local.residency.demand import Demand, IntArray, Wave
from clover_local.residency.table import SlotTable

if TYPE_CHECKING:  # Triton is loaded where there is a GPU
    from clover_local.experts.kernel_waves import SlotMaps


@dataclass(frozen=True, eq=False)
class _Work:
    """What a layer has to compute: rows, their choices, and where results go."""

    layer: int
    x: Tensor
    routing: AnyRouting
    choices: Choices
    results: Tensor


@dataclass(eq=False)
class ExpertPool:
    """Serves some layers: the table decides, this copies and computes."""

    table: SlotTable
    slots: Slots
    store: ExpertStore
    copies: Copies
    maps: "SlotMaps | None" = None
    """Where Triton's kernels run the experts."""

    def forward(
        self,
        demand: Demand,
        x: Tensor,
        *,
        routing: AnyRouting,
        choices: Choices,
        results: Tensor,
        traffic: Traffic,
    ) -> None:
        """Writes the weighted result of every choice to its place in `results` [T, A, D]."""
        self.copies.begin()
        if len(self.slots.holds) != self.table.slots:  # a resize was interrupted
            self.slots.resize(self.table.slots, np.empty((0, 2), np.int64))
        work = _Work(demand.layer, x, routing, choices, results)
        for wave in self.table.admit(demand).waves:
            self._wave(work, wave, traffic=traffic)

    def resize(self, slots: int) -> None:
        """Another number of slots, between two forwards.

        Raises:
            torch.OutOfMemoryError: no room; the table has changed, but there are no slots.
        """
        self.copies.begin()
        resized = self.table.resize(slots)
        self.slots.resize(slots, resized.moves)

    def _wave(self, work: _Work, wave: Wave, *, traffic: Traffic) -> None:
        """Copies what is missing, and runs the others meanwhile where that is possible."""
        first = key_of(work.layer, 0, self.store.num_experts)
        absent = self.slots.holds[wave.slots] != wave.experts + first  # after a failed copy
        absent[wave.copied] = True
        self.copies.start(
            [
                Copy(work.layer, expert, slot)
                for expert, slot in zip(
                    wave.experts[absent].tolist(), wave.slots[absent].tolist(), strict=True
                )
            ],
            traffic=traffic,
        )
        places = np.searchsorted(work.choices.experts, wave.experts)
        if self.copies.overlaps and absent.any() and not absent.all():
            self._compute(work, places[~absent], slots=wave.slots[~absent])
            self.copies.wait()
            self._compute(work, places[absent], slots=wave.slots[absent])
        else:
            self.copies.wait()
            self._compute(work, places, slots=wave.slots)
        self.copies.used(wave.slots)

    def _compute(self, work: _Work, places: IntArray, *, slots: IntArray) -> None:
        """Computes experts, given by their places in `Choices.experts`, in these slots."""
        layouts = self.store.layouts(work.layer)
        kernel = layouts[0].kernel
        if self.maps is not None and kernel is not None:
            self._by_kernels(work, places, slots=slots, layout=kernel)
            return
        of_each = [layouts[expert] for expert in work.choices.experts[places].tolist()]
        for layout in dict.fromkeys(of_each):
            alike = np.array([each is layout for each in of_each])
            compute_matrices(
                work.x,
                work.routing,
                work.choices,
                places=places[alike],
                matrices=self.slots.matrices(slots[alike], layout),
                results=work.results,
            )

    def _by_kernels(
        self, work: _Work, places: IntArray, *, slots: IntArray, layout: RecordLayout
    ) -> None:
        from clover_local.experts.kernel_waves import compute_records

        assert self.maps is not None and isinstance(self.slots, RecordSlots)
        where = np.full(len(work.choices.experts), -1)
        where[places] = slots
        compute_records(
            work.x,
            work.routing,
            records=self.slots.records,
            layout=layout,
            slot_of_expert=self.maps.of(work.layer, work.choices.experts, slots=where),
            results=work.results,
        )
