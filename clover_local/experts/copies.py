"""How records come into slots: at once on a CPU; on a GPU see `stream.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from clover_local.experts.slots import Slots
from clover_local.experts.store import ExpertStore
from clover_local.experts.traffic import Traffic
from clover_local.residency.demand import IntArray


@dataclass(frozen=True, slots=True)
class Copy:
    """An expert's record to a slot."""

    layer: int
    expert: int
    slot: int


class Copies(Protocol):
    """Makes copies and writes down, one by one, what is in the slots then."""

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns before the copies are made."""

    def begin(self) -> None:
        """A layer begins: the host has waited for all that was computed before."""

    def start(self, copies: Sequence[Copy], *, traffic: Traffic) -> None:
        """Starts copies in this order; no slot twice.

        Raises:
            CheckpointError: a record cannot be read. The copies before it are made.
        """

    def wait(self) -> None:
        """What is computed from now on finds all copies made."""

    def used(self, slots: IntArray) -> None:
        """What was launched so far reads these slots: later copies to them come behind it."""


class DirectCopies:
    """Copies into slots in host memory, which are reads from the files."""

    overlaps = False

    def __init__(self, store: ExpertStore, slots: Slots) -> None:
        self._store, self._slots = store, slots

    def begin(self) -> None:
        """See `Copies`."""

    def start(self, copies: Sequence[Copy], *, traffic: Traffic) -> None:
        """See `Copies`."""
        for copy in copies:
            began = time.perf_counter()
            layout = self._store.layouts(copy.layer)[copy.expert]
            self._slots.put(
                copy.slot,
                key_of(copy.layer, copy.expert, self._store.num_experts),
                layout,
                read=partial(self._read, copy),
            )
            traffic.records += 1
            traffic.bytes += layout.nbytes
            traffic.exposed_ms += 1000 * (time.perf_counter() - began)

    def _read(self, copy: Copy, into: Tensor) -> None:
        self._store.read(copy.layer, copy.expert, into=into)

    def wait(self) -> None:
        """See `Copies`; they are made."""

    def used(self, slots: IntArray) -> None:
        """See `Copies`; computing is over when it returns."""


def key_of(layer: int, expert: int, num_experts: int) -> int:
    """An expert's number in the whole model."""
    return layer * num_experts + expert
