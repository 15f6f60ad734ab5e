"""Which expert is in which slot of the device, and what happens when one is missing.

One table serves the layers whose expert records have one size: its slots are a common pool, any
slot holds any expert of these layers. The rules, in order of precedence:

1. A prompt takes free slots and no others; what else it misses streams through passing slots.
2. What the current block has used is never evicted: where nothing else is left, a missing expert
   is refused, computed from a passing slot and forgotten.
3. A layer that holds `floor` experts or fewer loses none to another layer.
4. Among the rest the policy decides: the expert of least value goes, or the newcomer is refused
   where it is not worth more.

Deciding costs what has changed: values are sorted once a block, because what a policy may evict
in a block is what the block has not used, and the values of those stand still until the next one.
The runtime and `clover-local simulate` run this same code, so what is simulated is what happens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clover_local.residency.demand import (
    NONE,
    Admission,
    Demand,
    FloatArray,
    IntArray,
    Kind,
    Resized,
    Wave,
)
from clover_local.residency.policies import Policy
from clover_local.residency.victims import Victims

MOST_PASSING = 32


@dataclass
class Counts:
    """Experts asked for by one kind of forward, each counted once a layer and forward."""

    hits: int = 0
    misses: int = 0
    refused: int = 0
    """Of the misses, those that were not kept; of a prompt: streamed."""
    evicted: int = 0

    def add(self, other: "Counts") -> None:
        """Adds another table's counts."""
        self.hits += other.hits
        self.misses += other.misses
        self.refused += other.refused
        self.evicted += other.evicted

    @property
    def hit_rate(self) -> float | None:
        """None before the first demand."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class SlotTable:
    """The slots for one size of record, and who is in them."""

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        *,
        slots: int,
        policy: Policy,
        passing: int | None = None,
        floor: int | None = None,
        permanent: Sequence[tuple[int, int]] = (),
    ) -> None:
        """An empty table.

        Args:
            layers: the model's layers that it serves.
            slots: all slots. The passing ones among them come last.
            policy: made for len(layers) * num_experts keys.
            passing: slots for experts that are not kept, used half by half in turn; default: as
                `passing_slots` says.
            floor: experts that a layer cannot lose to another one, at most an even share;
                default: half an even share.
            permanent: (layer, expert) that are not evicted once they are in; `resize` may.

        Raises:
            ValueError: no slots, no experts, or passing slots that do not fit.
        """
        if slots < 1 or num_experts < 1 or not layers:
            raise ValueError(f"{slots} slots for {len(layers)} layers of {num_experts} experts")
        self.layers = tuple(layers)
        self.num_experts = num_experts
        self.policy = policy
        self.counts: dict[Kind, Counts] = {}
        self._wanted_passing, self._wanted_floor = passing, floor
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        size = len(self.layers) * num_experts
        self._slot_of = np.full(size, -1, np.int64)
        self._permanent = np.zeros(size, bool)
        for layer, expert in permanent:
            self._permanent[self._index[layer] * num_experts + expert] = True
        self._fresh = ~self._permanent  # may be evicted: the block has not used it
        self._held = [0] * len(self.layers)
        self._block: int | None = None
        self._victims: Victims | None = None
        self._owner = NONE
        self._resize(slots)

    @property
    def slot_of(self) -> NDArray[np.int64]:
        """[layers, E]: the slot of each expert, -1 = not resident."""
        return self._slot_of.reshape(len(self.layers), -1).copy()

    @property
    def expert_of(self) -> NDArray[np.int64]:
        """[kept]: the key in each slot that keeps experts, -1 = free."""
        return self._owner.copy()

    @property
    def resident(self) -> int:
        """Experts that are in slots."""
        return sum(self._held)

    def admit(self, demand: Demand) -> Admission:
        """Serves a demand: finds or makes room, and says what to copy where and compute when.

        Raises:
            ValueError: a layer that another table serves, or no experts.
        """
        if demand.layer not in self._index or not len(demand.experts):
            raise ValueError(f"{len(demand.experts)} experts of layer {demand.layer}")
        keys = demand.experts + self._index[demand.layer] * self.num_experts
        is_prompt = demand.kind == "prompt"
        if not is_prompt:
            self._enter(demand.block)
            self._fresh[keys] = False
            self.policy.used(keys, demand)
        counts = self.counts.get(demand.kind)
        if counts is None:
            counts = self.counts[demand.kind] = Counts()
        slots = self._slot_of[keys]
        if slots.min() >= 0:
            counts.hits += len(keys)
            return Admission((Wave(demand.experts, slots, NONE),), len(keys), 0, NONE, 0)
        missing = np.flatnonzero(slots < 0)
        bids = None if is_prompt else self.policy.bids(keys[missing], demand)
        found, evicted = self._make_room(keys[missing], bids)
        slots[missing] = found
        refused = np.flatnonzero(slots < 0)
        counts.hits += len(keys) - len(missing)
        counts.misses += len(missing)
        counts.refused += len(refused)
        counts.evicted += len(evicted)
        return Admission(
            tuple(self._waves(demand.experts, slots, missing, refused)),
            len(keys) - len(missing),
            len(missing),
            np.array(evicted, np.int64),
            len(refused),
        )

    def place(self, layer: int, experts: IntArray, *, evict: bool) -> tuple[Wave, IntArray]:
        """Room for experts before anybody asks: to fill an empty cache, or to prefetch.

        Those that are not resident get free slots, then, with `evict`, slots of experts that the
        block has not used and the policy values less. They count as neither hits nor misses.

        Returns:
            The experts that got a slot, all to be copied, and the keys of those that lost theirs.
        """
        keys = experts + self._index[layer] * self.num_experts
        absent = np.flatnonzero(self._slot_of[keys] < 0)
        values = self.policy.values(keys[absent])
        evicted: list[int] = []
        found = np.full(len(absent), -1, np.int64)
        if len(absent):
            found, evicted = self._make_room(keys[absent], values if evict else None)
        kept = np.flatnonzero(found >= 0)
        wave = Wave(experts[absent[kept]], found[kept], np.arange(len(kept)))
        return wave, np.array(evicted, np.int64)

    def resize(self, slots: int) -> Resized:
        """Grows or shrinks the table, also within a block.

        What does not fit any more goes by value: first what the block has not used, then the
        rest, the permanent experts last. Floors do not count here.

        Raises:
            ValueError: no slots, or passing slots that do not fit.
        """
        if slots < 1:
            raise ValueError(f"{slots} slots for {len(self.layers)} layers")
        return self._resize(slots)

    def _resize(self, slots: int) -> Resized:
        size = len(self._slot_of)
        passing = passing_slots(slots, experts=size)
        if self._wanted_passing is not None and slots < size:
            passing = self._wanted_passing
        if passing > slots or (slots < size and passing < 1):
            raise ValueError(f"{passing} passing slots of {slots}")
        self.slots, self.passing, self.kept = slots, passing, min(slots - passing, size)
        even = self.kept // len(self.layers)
        self.floor = even // 2 if self._wanted_floor is None else min(self._wanted_floor, even)
        residents = np.flatnonzero(self._slot_of >= 0)
        lost = NONE
        if len(residents) > self.kept:
            values = self.policy.values(residents)
            order = np.lexsort((values, ~self._fresh[residents], self._permanent[residents]))
            lost = np.sort(residents[order[: len(residents) - self.kept]])
            self._slot_of[lost] = -1
        self._turn = 0
        moves = self._rebuild()
        return Resized(lost, moves)

    def _rebuild(self) -> IntArray:
        """Owners and free slots anew from `_slot_of`; moves [n, 2] out of slots that are gone."""
        residents = np.flatnonzero(self._slot_of >= 0)
        slots = self._slot_of[residents]
        owner = np.full(self.kept, -1, np.int64)
        inside = slots < self.kept
        owner[slots[inside]] = residents[inside]
        moving = residents[~inside]
        targets = np.flatnonzero(owner < 0)[: len(moving)]
        moves = np.stack([self._slot_of[moving], targets], axis=1)
        owner[targets] = moving
        self._slot_of[moving] = targets
        self._owner = owner
        self._free = np.flatnonzero(owner < 0)[::-1].tolist()
        held = np.bincount(residents // self.num_experts, minlength=len(self.layers))
        self._held = held.tolist()
        self._victims = None
        return moves

    def _enter(self, block: int) -> None:
        """Starts a block, if it is a new one: what the last one used is protected no more."""
        if block != self._block:
            if self._block is not None:
                self.policy.end_block()
            self._block = block
            self._fresh = ~self._permanent
            self._victims = None

    def _make_room(self, keys: IntArray, bids: FloatArray | None) -> tuple[IntArray, list[int]]:
        """A slot for each of a layer's missing experts, or -1; and who was evicted for them.

        Those with the largest bids are served first. Without bids only free slots are taken.
        """
        found = np.full(len(keys), -1, np.int64)
        evicted: list[int] = []
        layer = int(keys[0]) // self.num_experts
        if bids is None:
            bids = np.full(len(keys), -np.inf)
        for place in np.argsort(-bids, kind="stable").tolist():
            if self._free:
                slot = self._free.pop()
            else:
                victim = self._take_victim(layer, below=float(bids[place]))
                if victim is None:
                    break
                evicted.append(victim)
                slot = int(self._slot_of[victim])
                self._slot_of[victim] = -1
                self._held[victim // self.num_experts] -= 1
            found[place] = slot
            self._slot_of[keys[place]] = slot
            self._owner[slot] = keys[place]
            self._held[layer] += 1
            if self._victims is not None and self._held[layer] > self.floor:
                self._victims.grown(layer)
        return found, evicted

    def _take_victim(self, layer: int, *, below: float) -> int | None:
        if below == -np.inf or not self.kept:
            return None
        if self._victims is None:
            residents = np.flatnonzero((self._slot_of >= 0) & self._fresh)
            self._victims = Victims(
                residents,
                self.policy.values(residents),
                layers=len(self.layers),
                num_experts=self.num_experts,
            )
        return self._victims.take(
            layer, below=below, may_go=self._fresh, held=self._held, floor=self.floor
        )

    def _waves(
        self, experts: IntArray, slots: IntArray, missing: IntArray, refused: IntArray
    ) -> Iterator[Wave]:
        """First all that have a slot, with as many of the others as pass at once; then those."""
        if not len(refused):
            yield Wave(experts, slots, missing)
            return
        copied = np.zeros(len(experts), bool)
        copied[missing] = True
        half = max(1, self.passing // 2)
        for start in range(0, len(refused), half):
            part = refused[start : start + half]
            base = self.kept + self._turn
            self._turn = half - self._turn if self.passing > 1 else 0
            if start == 0:
                part = np.union1d(np.flatnonzero(slots >= 0), part)
            passing = slots[part] < 0
            slots[part[passing]] = base + np.arange(passing.sum())
            yield Wave(experts[part], slots[part], np.flatnonzero(copied[part]))


def passing_slots(slots: int, *, experts: int) -> int:
    """Passing slots of a table of `slots`: one in 64, 2 to 32; none where all experts fit."""
    return 0 if slots >= experts else min(max(slots // 64, 2), MOST_PASSING, slots)
