"""Copies to a GPU on a stream of their own, from pinned memory, beside what is computed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clover_local.experts.copies import Copy, key_of
from clover_local.experts.pinned import HostRecords
from clover_local.experts.slots import EMPTY, RecordSlots
from clover_local.experts.store import ExpertStore
from clover_local.experts.traffic import Traffic
from clover_local.residency.demand import IntArray


@dataclass(eq=False)
class _Timed:
    """Events around copies, and around the wait for them."""

    traffic: Traffic
    began: torch.cuda.Event
    ended: torch.cuda.Event
    waits: torch.cuda.Event | None = None
    waited: torch.cuda.Event | None = None


class StreamCopies:
    """Copies of records to slots on a GPU; see `Copies`.

    Between the streams stand events: a copy waits for what was launched on its slot in this layer,
    a computation for the copies before it. What earlier layers computed is done, as each layer
    waits for its routing.
    """

    overlaps = True

    def __init__(
        self,
        store: ExpertStore,
        slots: RecordSlots,
        *,
        device: torch.device,
        host: HostRecords,
    ) -> None:
        self._store, self._slots, self._device = store, slots, device
        self._host = host
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._users: dict[int, torch.cuda.Event] = {}
        self._unawaited: list[_Timed] = []
        self._timed: deque[_Timed] = deque()
        torch.cuda.synchronize(device)  # until here the slots' memory may have had other users

    def begin(self) -> None:
        """See `Copies`; waits for copies that an interrupted layer has left."""
        self._users.clear()
        self.wait()
        self._harvest()

    def start(self, copies: Sequence[Copy], *, traffic: Traffic) -> None:
        """See `Copies`."""
        if not copies:
            return
        for event in {self._users[copy.slot] for copy in copies if copy.slot in self._users}:
            self._stream.wait_event(event)
        began = self._event(self._stream)
        try:
            for copy in copies:
                self._copy(copy)
                traffic.records += 1
                traffic.bytes += self._store.layouts(copy.layer)[copy.expert].nbytes
        finally:
            self._unawaited.append(_Timed(traffic, began, self._event(self._stream)))

    def wait(self) -> None:
        """See `Copies`."""
        main = torch.cuda.current_stream(self._device)
        while self._unawaited:
            timed = self._unawaited[0]
            timed.waits = self._event(main)
            main.wait_event(timed.ended)
            timed.waited = self._event(main)
            self._timed.append(timed)
            del self._unawaited[0]

    def used(self, slots: IntArray) -> None:
        """See `Copies`."""
        event = self._event(torch.cuda.current_stream(self._device))
        self._users.update(dict.fromkeys(slots.tolist(), event))

    def _copy(self, copy: Copy) -> None:
        layout = self._store.layouts(copy.layer)[copy.expert]
        key = copy.layer, copy.expert
        slot = self._slots.records[copy.slot][: layout.nbytes]
        self._slots.holds[copy.slot] = EMPTY
        row = self._host.pinned.row(key)
        if row is None:
            source = self._host.ring.entry()[: layout.nbytes]
            self._store.read(copy.layer, copy.expert, into=source)
        else:
            source = row[: layout.nbytes]
        with torch.cuda.stream(self._stream):
            slot.copy_(source, non_blocking=True)
        if row is None:
            self._host.ring.sent(self._event(self._stream))
        self._slots.holds[copy.slot] = key_of(copy.layer, copy.expert, self._store.num_experts)

    def _harvest(self) -> None:
        """Times of copies that are over."""
        while self._timed:
            timed = self._timed[0]
            assert timed.waits is not None and timed.waited is not None
            if not timed.waited.query():  # type: ignore[no-untyped-call]
                return
            self._timed.popleft()
            exposed = timed.waits.elapsed_time(timed.waited)
            timed.traffic.exposed_ms += exposed
            timed.traffic.hidden_ms += max(0.0, timed.began.elapsed_time(timed.ended) - exposed)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
