"""Routed experts of which only some are on the device: the others are copied when they are asked
for.

Bit for bit the results are those of resident experts, whatever the policy and the number of slots:
an expert's rows are in one product, and each choice has its own place in the results, which are
added in routing order at the end. A layer asks for more experts than there are slots: then it
computes in waves. Every miss is one copy.

The order in a layer: the experts in use go to the host (some hundred numbers), the slot table
decides, copies start in the order of experts, what is there is computed while they travel, then
the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from clover_local.errors import SettingsError
from clover_local.experts.choices import Choices
from clover_local.experts.copies import Copies, Copy, DirectCopies
from clover_local.experts.pinned import HostRecords
from clover_local.experts.pool import ExpertPool
from clover_local.experts.protocol import Cut, ExpertResults
from clover_local.experts.slots import MatrixSlots, RecordSlots, Slots, are_blocked
from clover_local.experts.store import ExpertStore, Key
from clover_local.experts.traffic import OffloadStats, Traffic
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AnyRouting
from clover_local.memory.sizes import shown
from clover_local.residency.demand import Demand, Kind
from clover_local.residency.pools import SlotPools
from clover_local.residency.table import SlotTable, passing_slots

READERS = 4
"""Threads that fill: memory that is touched for the first time costs as much as the disk."""
READ_AHEAD = 64
"""Records that they get at a time: so many are read on after an interrupt."""
SHRINK_PARTS = 8
"""A step of `shrink` gives up one in so many slots."""


class OffloadedExperts:
    """Experts in slots on the model's device, the rest with the host; see `Experts`."""

    def __init__(
        self,
        store: ExpertStore,
        pools: SlotPools,
        *,
        device: torch.device | str,
        host: HostRecords | None = None,
    ) -> None:
        """Makes the slots, all empty; `fill` fills them.

        Args:
            store: of the checkpoint, made for this device.
            pools: a table for each size of record that the store has.
            device: where the slots are.
            host: pinned memory for a GPU's copies; a small ring, if not given. A CPU needs none.

        Raises:
            ValueError: the tables are not for this store.
            torch.OutOfMemoryError: the slots do not fit.
        """
        self._store, self._device = store, torch.device(device)
        layers = sorted(layer for pool in pools.pools for layer in pool.layers)
        if layers != list(range(store.num_layers)):
            raise ValueError(f"tables for layers {layers}, the model has {store.num_layers}")
        self._tables = pools
        self._host = host
        if host is None and self._device.type == "cuda":
            self._host = HostRecords(store)
        self._pools = [
            self._make_pool(table, pool.record_bytes)
            for table, pool in zip(pools.tables, pools.pools, strict=True)
        ]
        self._pool_of = {layer: pool for pool in self._pools for layer in pool.table.layers}
        self._traffic: dict[Kind, Traffic] = {}
        self._filled = Traffic()
        self._kind: Kind = "commit"
        self._block, self._number = -1, 0
        self._cut: Cut | None = None
        self._fixed: dict[tuple[int, int, int], Tensor] = {}
        """Results between graphs, which every layer uses in turn."""

    @property
    def waits_because(self) -> None:
        """See `Experts.waits_because`: what waits goes to the cut."""

    @property
    def slots(self) -> int:
        """Slots of all pools, the passing ones among them."""
        return sum(pool.table.slots for pool in self._pools)

    @property
    def least_slots(self) -> int:
        """So few they can become."""
        return sum(_least(pool.table) for pool in self._pools)

    @property
    def most_slots(self) -> int:
        """One for each expert."""
        return self._store.num_layers * self._store.num_experts

    def begin(self, kind: Kind, *, block: int) -> None:
        """See `Experts.begin`."""
        self._number = self._number + 1 if block == self._block else 0
        self._kind, self._block = kind, block

    def cut_with(self, cut: Cut | None) -> None:
        """See `Experts.cut_with`."""
        self._cut = cut

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        """See `Experts.forward`.

        Raises:
            CheckpointError: a record could not be read; the next forward tries it again.
        """
        rows, per_row = routing.expert_ids.shape
        shape = (rows, per_row, self._store.hidden)
        if self._cut is None:
            results = torch.empty(shape, dtype=torch.float32, device=x.device)
            self._serve(layer, x, routing=routing, results=results)
        else:
            if shape not in self._fixed:
                self._fixed[shape] = torch.empty(shape, dtype=torch.float32, device=x.device)
            results = self._fixed[shape]
            self._cut(lambda: self._serve(layer, x, routing=routing, results=results))
        return ExpertResults(results, routing.expert_ids)

    def _serve(self, layer: int, x: Tensor, *, routing: AnyRouting, results: Tensor) -> None:
        """Finds out which experts are asked for, copies those that are missing, computes all."""
        choices = Choices.of(routing.expert_ids, self._store.num_experts)
        if not len(choices.experts):
            return
        self._pool_of[layer].forward(
            Demand(layer, choices.experts, choices.counts, self._kind, self._block, self._number),
            x,
            routing=routing,
            choices=choices,
            results=results,
            traffic=self._traffic.setdefault(self._kind, Traffic()),
        )

    @torch.inference_mode()
    def fill(
        self,
        first: Sequence[Key] = (),
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Reads records into free slots and into pinned memory, the files once from front to back.

        Args:
            first: (layer, expert) that get a slot before all others, in this order; then those of
                the lowest numbers in all layers.
            on_progress: called after each record with bytes read and bytes in all.

        Raises:
            CheckpointError: a file cannot be read. What was read is in its place.
        """
        copies = self._placed(first)
        wanted = sorted(
            {*copies, *(self._host.pinned if self._host is not None else ())},
            key=lambda key: self._store.place_in_files(*key),
        )
        total = sum(self._bytes_of(key) for key in wanted)
        done = 0
        with ThreadPoolExecutor(READERS) as readers:
            for start in range(0, len(wanted), READ_AHEAD):
                batch = wanted[start : start + READ_AHEAD]
                for key, traffic in zip(
                    batch, readers.map(lambda key: self._read(key, copies), batch), strict=True
                ):
                    pool = self._pool_of[key[0]]
                    if key in copies and pool.copies.overlaps:
                        pool.copies.start([copies[key]], traffic=traffic)
                    self._filled.add(traffic)
                    done += self._bytes_of(key)
                    on_progress(done, total)

    @torch.inference_mode()  # a thread has its own
    def _read(self, key: Key, copies: Mapping[Key, Copy]) -> Traffic:
        """Reads a record into host memory, where it is to be: pinned, or in a CPU's slot."""
        traffic, pool = Traffic(), self._pool_of[key[0]]
        if self._host is not None and key in self._host.pinned:
            self._host.pin(key)
        if key in copies and not pool.copies.overlaps:
            pool.copies.start([copies[key]], traffic=traffic)
        return traffic

    @torch.inference_mode()
    def resize(self, slots: int) -> None:
        """Another number of slots in all, at any time between two forwards, also within a block.

        Raises:
            SettingsError: fewer than the least, more than there are experts, or no room; then
                there are as many as before.
        """
        if not self.least_slots <= slots <= self.most_slots:
            raise SettingsError(
                f"{slots} expert slots: this model can have {self.least_slots} to {self.most_slots}"
            )
        before = [pool.table.slots for pool in self._pools]
        wanted = _shares(slots, self._pools)
        try:
            for pool, count in zip(self._pools, wanted, strict=True):
                pool.resize(count)
        except torch.OutOfMemoryError:
            for pool, count in zip(self._pools, before, strict=True):
                pool.resize(count)
            raise SettingsError(
                f"there is no room on the device for {slots} expert slots: pass fewer, "
                f"{sum(before)} are kept"
            ) from None

    @torch.inference_mode()
    def shrink(self) -> str | None:
        """Gives up an eighth of the slots, or more where that many do not fit.

        Returns:
            The line that says so; None where there are no slots to give up.
        """
        before, bytes_before = self.slots, self._slot_bytes()
        while True:
            counts = [_shrunk(pool.table) for pool in self._pools]
            if counts == [pool.table.slots for pool in self._pools]:
                return None
            try:
                for pool, count in zip(self._pools, counts, strict=True):
                    pool.resize(count)
            except torch.OutOfMemoryError:
                continue
            freed = shown(bytes_before - self._slot_bytes())
            return f"out of memory: {self.slots} expert slots instead of {before}, {freed} freed"

    def stats(self) -> OffloadStats:
        """Counts since the start."""
        return OffloadStats(
            counts=self._tables.counts,
            traffic={kind: replace(traffic) for kind, traffic in self._traffic.items()},
            filled=replace(self._filled),
            slots=self.slots,
            passing=sum(pool.table.passing for pool in self._pools),
            resident=sum(pool.table.resident for pool in self._pools),
            experts=self.most_slots,
            device_bytes=self.device_bytes,
            pinned_bytes=0 if self._host is None else self._host.nbytes,
        )

    @property
    def device_bytes(self) -> int:
        """Slots and maps."""
        maps = sum(pool.maps.nbytes for pool in self._pools if pool.maps is not None)
        return self._slot_bytes() + maps

    def _slot_bytes(self) -> int:
        return sum(pool.slots.nbytes for pool in self._pools)

    def _bytes_of(self, key: Key) -> int:
        return self._store.layouts(key[0])[key[1]].nbytes

    def _placed(self, first: Sequence[Key]) -> dict[Key, Copy]:
        """Copies into the free slots: as many experts as each table keeps."""
        copies: dict[Key, Copy] = {}
        order = list(dict.fromkeys([*first, *self._store.keys]))
        for pool in self._pools:
            table = pool.table
            mine = [key for key in order if key[0] in table.layers][: table.kept - table.resident]
            for layer in table.layers:
                experts = np.array([expert for at, expert in mine if at == layer], np.int64)
                wave, _ = table.place(layer, experts, evict=False)
                for expert, slot in zip(wave.experts.tolist(), wave.slots.tolist(), strict=True):
                    copies[layer, expert] = Copy(layer, expert, slot)
        return copies

    def _make_pool(self, table: SlotTable, record_bytes: int) -> ExpertPool:
        device, store = self._device, self._store
        layouts = {layout for layer in table.layers for layout in store.layouts(layer)}
        if max(layout.nbytes for layout in layouts) > record_bytes:
            raise ValueError(
                f"slots of {record_bytes} bytes for records of "
                f"{max(layout.nbytes for layout in layouts)}"
            )
        slots: Slots
        if any(are_blocked(layout, device=device) for layout in layouts):
            slots = MatrixSlots(table.slots, record_bytes)
        else:
            slots = RecordSlots(table.slots, record_bytes, device=device)
        copies: Copies = DirectCopies(store, slots)
        if device.type == "cuda":
            from clover_local.experts.stream import StreamCopies

            assert self._host is not None and isinstance(slots, RecordSlots)
            copies = StreamCopies(store, slots, device=device, host=self._host)
        maps = None
        if dispatch.on_gpu(torch.empty(0, device=device)):
            from clover_local.experts.kernel_waves import SlotMaps

            maps = SlotMaps(table.layers, table.num_experts, device=device)
        return ExpertPool(table, slots, store, copies, maps)


def _least(table: SlotTable) -> int:
    """One slot a layer; where the passing ones were given, one more than those."""
    size = len(table.layers) * table.num_experts
    default = passing_slots(table.slots, experts=size) == table.passing
    return len(table.layers) if default else max(len(table.layers), table.passing + 1)


def _shrunk(table: SlotTable) -> int:
    return max(_least(table), table.slots - max(1, table.slots // SHRINK_PARTS))


def _shares(slots: int, pools: Sequence[ExpertPool]) -> list[int]:
    """`slots` for each pool, the same share of what it has now; sums up, within its limits."""
    least = [_least(pool.table) for pool in pools]
    most = [len(pool.table.layers) * pool.table.num_experts for pool in pools]
    have = [pool.table.slots for pool in pools]
    shares = [
        min(max(slots * own // sum(have), low), high)
        for own, low, high in zip(have, least, most, strict=True)
    ]
    for number, (low, high) in enumerate(zip(least, most, strict=True)):
        rest = slots - sum(shares)
        shares[number] = min(max(shares[number] + rest, low), high)
    return shares
