"""Small traces, and a device that checks every copy and every wave."""

from collections.abc import Sequence

import numpy as np
import pytest

from clover_local.residency.demand import Admission, Demand, Kind, Resized, Wave
from clover_local.residency.policies import make_policy
from clover_local.residency.profile import profile_of
from clover_local.residency.synthetic import Synthetic, synthetic_trace
from clover_local.residency.table import SlotTable
from clover_local.residency.trace import RoutingTrace


def demand(
    layer: int, experts: Sequence[int], kind: Kind = "preview", block: int = 0, number: int = 0
) -> Demand:
    """A demand of these experts, one row each."""
    ids = np.array(experts, dtype=np.int64)
    return Demand(layer, ids, np.ones(len(ids), np.int64), kind, block, number)


def table(
    layers: int,
    experts: int,
    *,
    slots: int,
    policy: str = "lru",
    passing: int | None = None,
    floor: int | None = None,
    permanent: Sequence[tuple[int, int]] = (),
) -> SlotTable:
    """A table with a new policy; `static` prefers experts of small ids."""
    prior = np.tile(np.linspace(1, 0, experts), (layers, 1)) if policy == "static" else None
    return SlotTable(
        range(layers),
        experts,
        slots=slots,
        policy=make_policy(policy, layers=layers, num_experts=experts, prior=prior),
        passing=passing,
        floor=floor,
        permanent=permanent,
    )


class Device:
    """Slots as the runtime has them: does what a table says, and checks that it is right."""

    def __init__(self, slots: SlotTable) -> None:
        self.table = slots
        self.content = [-1] * slots.slots  # the key of the record in each slot
        self.copies = 0

    def copy(self, layer: int, wave: Wave) -> None:
        """The copies of a wave."""
        for place in wave.copied.tolist():
            key = layer * self.table.num_experts + int(wave.experts[place])
            self.content[int(wave.slots[place])] = key
            self.copies += 1

    def run(self, demand: Demand) -> Admission:
        """Serves a demand; every expert must be computed once, from a slot that holds it."""
        admission = self.table.admit(demand)
        computed: list[int] = []
        for wave in admission.waves:
            self.copy(demand.layer, wave)
            assert len(set(wave.slots.tolist())) == len(wave.experts)
            for expert, slot in zip(wave.experts.tolist(), wave.slots.tolist(), strict=True):
                assert self.content[slot] == demand.layer * self.table.num_experts + expert
                computed.append(expert)
        assert sorted(computed) == demand.experts.tolist()
        copies = sum(len(wave.copied) for wave in admission.waves)
        assert copies == admission.misses
        assert admission.hits + admission.misses == len(demand.experts)
        return admission

    def resize(self, slots: int) -> Resized:
        """Makes the moves into slots of another number."""
        resized = self.table.resize(slots)
        content = [*self.content[:slots], *[-1] * (slots - len(self.content))]
        for source, target in resized.moves.tolist():
            content[target] = self.content[source]
        self.content = content
        return resized

    def check(self) -> None:
        """The table's map must be what is in the slots."""
        slot_of = self.table.slot_of.ravel()
        residents = np.flatnonzero(slot_of >= 0)
        assert len(residents) == self.table.resident <= self.table.kept
        for key in residents.tolist():
            assert slot_of[key] < self.table.kept
            assert self.content[slot_of[key]] == self.table.expert_of[slot_of[key]] == key
        assert (self.table.expert_of >= 0).sum() == len(residents)


@pytest.fixture(scope="session")
def trace() -> RoutingTrace:
    """Eight layers with the statistics of `synthetic.py`."""
    return synthetic_trace(Synthetic(layers=8))


@pytest.fixture(scope="session")
def shares(trace: RoutingTrace) -> np.ndarray:
    return profile_of(trace).shares
