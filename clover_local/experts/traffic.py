"""What the experts cost: how often they were asked for, what was copied, who waited for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from clover_local.residency.demand import Kind
from clover_local.residency.table import Counts


@dataclass
class Traffic:
    """Copies from the host that one kind of forward caused."""

    records: int = 0
    bytes: int = 0
    exposed_ms: float = 0.0
    """For so long nothing was computed because a copy was not there yet."""
    hidden_ms: float = 0.0
    """Of the copies' own time, what passed behind computation."""

    def add(self, other: "Traffic") -> None:
        """Adds another one's numbers."""
        self.records += other.records
        self.bytes += other.bytes
        self.exposed_ms += other.exposed_ms
        self.hidden_ms += other.hidden_ms


@dataclass(frozen=True)
class OffloadStats:
    """The expert cache so far: by kind of forward, and what it takes up."""

    counts: Mapping[Kind, Counts]
    """Hits, misses, evictions and refusals, each expert once a layer and forward."""
    traffic: Mapping[Kind, Traffic]
    filled: Traffic
    """What was copied before anybody asked for it: when the slots were filled."""
    slots: int
    passing: int
    """Of the slots, those for experts that are not kept."""
    resident: int
    experts: int
    """Of all layers."""
    device_bytes: int
    pinned_bytes: int

    @property
    def total(self) -> Counts:
        """Of all kinds."""
        return _sum(Counts(), self.counts.values())

    @property
    def copied(self) -> Traffic:
        """Of all kinds, without what was filled."""
        return _sum(Traffic(), self.traffic.values())


_Total = TypeVar("_Total", Counts, Traffic)


def _sum(total: _Total, parts: Iterable[_Total]) -> _Total:
    for part in parts:
        total.add(part)
    return total
