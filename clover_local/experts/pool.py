"""The layers whose records have one size: their slot table, their slots, and how waves are run."""

from collections.abc import Callable
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
from clover_local.residency.demand import Demand, IntArray, Wave
from clover_local.residency.table import SlotTable

if TYPE_CHECKING:  # Triton is loaded where there is a GPU
    from clover_local.experts.kernel_waves import SlotMaps

Compute = Callable[[IntArray, IntArray], None]
"""Computes experts, given by their places in `Choices.experts`, in these slots."""


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
        compute = self._by_kernels if self._runs_kernels(demand.layer) else self._by_matrices

        def run(places: IntArray, slots: IntArray) -> None:
            compute(demand.layer, x, routing, choices, places, slots, results)

        for wave in self.table.admit(demand).waves:
            self._wave(demand, wave, run, traffic=traffic)

    def resize(self, slots: int) -> None:
        """Another number of slots, between two forwards.

        Raises:
            torch.OutOfMemoryError: no room; the table has changed, but there are no slots.
        """
        self.copies.begin()
        resized = self.table.resize(slots)
        self.slots.resize(slots, resized.moves)

    def _wave(self, demand: Demand, wave: Wave, run: Compute, *, traffic: Traffic) -> None:
        """Copies what is missing, and runs the others meanwhile where that is possible."""
        first = key_of(demand.layer, 0, self.store.num_experts)
        absent = self.slots.holds[wave.slots] != wave.experts + first  # after a failed copy
        absent[wave.copied] = True
        self.copies.start(
            [
                Copy(demand.layer, expert, slot)
                for expert, slot in zip(
                    wave.experts[absent].tolist(), wave.slots[absent].tolist(), strict=True
                )
            ],
            traffic=traffic,
        )
        places = np.searchsorted(demand.experts, wave.experts)
        if self.copies.overlaps and absent.any() and not absent.all():
            run(places[~absent], wave.slots[~absent])
            self.copies.wait()
            run(places[absent], wave.slots[absent])
        else:
            self.copies.wait()
            run(places, wave.slots)
        self.copies.used(wave.slots)

    def _runs_kernels(self, layer: int) -> bool:
        return self.maps is not None and self.store.layouts(layer)[0].kernel is not None

    def _by_kernels(
        self,
        layer: int,
        x: Tensor,
        routing: AnyRouting,
        choices: Choices,
        places: IntArray,
        slots: IntArray,
        results: Tensor,
    ) -> None:
        from clover_local.experts.kernel_waves import compute_records

        assert self.maps is not None and isinstance(self.slots, RecordSlots)
        layout = self.store.layouts(layer)[0].kernel
        assert layout is not None
        where = np.full(len(choices.experts), -1)
        where[places] = slots
        slot_of_expert = self.maps.of(layer, choices.experts, slots=where)
        compute_records(
            x,
            routing,
            records=self.slots.records,
            layout=layout,
            slot_of_expert=slot_of_expert,
            results=results,
        )

    def _by_matrices(
        self,
        layer: int,
        x: Tensor,
        routing: AnyRouting,
        choices: Choices,
        places: IntArray,
        slots: IntArray,
        results: Tensor,
    ) -> None:
        layouts = self.store.layouts(layer)
        of_each = [layouts[expert] for expert in choices.experts[places].tolist()]
        for layout in dict.fromkeys(of_each):
            alike = np.array([each is layout for each in of_each])
            compute_matrices(
                x,
                routing,
                choices,
                places=places[alike],
                matrices=self.slots.matrices(slots[alike], layout),
                results=results,
            )
