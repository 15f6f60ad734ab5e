"""Copies on a stream of their own: who waits for whom. Without a GPU streams are doubles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from clover_local.experts.copies import Copy
from clover_local.experts.pinned import HostRecords
from clover_local.experts.slots import RecordSlots
from clover_local.experts.store import ExpertStore
from clover_local.experts.stream import StreamCopies
from clover_local.experts.traffic import Traffic
from tests.experts.conftest import Disk, OnDisk

LOG: list[str] = []


class Event:
    """Says in the log where it was recorded and who waits for it."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1
        self.name = f"event {Event.made}"
        self.time = 0

    def record(self, stream: Stream) -> None:
        stream.clock += 1
        self.time = stream.clock
        LOG.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")

    def elapsed_time(self, later: Event) -> float:
        return later.time - self.time


class Stream:
    """Says in the log what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = 0

    def wait_event(self, event: Event) -> None:
        self.clock += 4
        LOG.append(f"{self.name} waits for {event.name}")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    Event.made = 0
    LOG.clear()
    yield


def copies_over(on_disk: OnDisk, *, pinned: int, disk: Disk) -> tuple[StreamCopies, RecordSlots]:
    """Ten slots, with the first experts of layer 0 pinned."""
    device = torch.device("cpu")
    store = ExpertStore(
        on_disk.checkpoint, on_disk.config, device=device, dtype=torch.float32, reader=disk
    )
    first = [(0, expert) for expert in range(pinned)]
    host = HostRecords(
        store,
        first,
        pin_bytes=1 << 30,
        allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )
    for key in first:
        host.pin(key)
    slots = RecordSlots(10, store.record_bytes[0], device=device)
    return StreamCopies(store, slots, device=device, host=host), slots


def test_records_come_from_pinned_memory_or_through_the_ring(quantized: OnDisk) -> None:
    disk, traffic = Disk(quantized.checkpoint), Traffic()
    copies, slots = copies_over(quantized, pinned=2, disk=disk)
    before = len(disk.reads)
    copies.start([Copy(0, 1, 7), Copy(0, 5, 3), Copy(1, 0, 4), Copy(2, 0, 5)], traffic=traffic)
    copies.wait()
    assert len(disk.reads) == before + 3
    assert slots.holds.tolist() == [-1, -1, -1, 5, 8, 16, -1, 1, -1, -1]
    assert traffic.records == 4 and traffic.bytes == 4 * slots.records.shape[1]
    record = torch.empty_like(slots.records[0])
    copies._store.read(0, 5, into=record)
    assert torch.equal(slots.records[3], record)
    assert [line for line in LOG if "host" in line] == ["host waits for event 2"]  # two entries


def test_computing_waits_for_copies_and_they_for_what_used_their_slots(quantized: OnDisk) -> None:
    copies, _ = copies_over(quantized, pinned=8, disk=Disk(quantized.checkpoint))
    copies.begin()
    copies.start([Copy(0, 0, 1)], traffic=Traffic())
    copies.wait()
    copies.used(np.array([1, 2]))
    copies.start([Copy(0, 1, 5)], traffic=Traffic())
    copies.start([Copy(0, 2, 2), Copy(0, 3, 1)], traffic=Traffic())
    assert [line for line in LOG if "waits" in line] == [
        "main waits for event 2",
        "side waits for event 5",
    ]
    LOG.clear()
    copies.begin()  # whatever happened before, the next layer waits for all
    assert sum("main waits" in line for line in LOG) == 2
    copies.start([Copy(0, 4, 1)], traffic=Traffic())
    assert not any("side waits" in line for line in LOG)


def test_after_a_failed_read_the_copies_before_it_are_waited_for(quantized: OnDisk) -> None:
    disk = Disk(quantized.checkpoint)
    copies, slots = copies_over(quantized, pinned=0, disk=disk)
    disk.fails_at = 1
    traffic = Traffic()
    with pytest.raises(KeyboardInterrupt):
        copies.start([Copy(0, 0, 1), Copy(0, 1, 2), Copy(0, 2, 3)], traffic=traffic)
    assert slots.holds.tolist() == [-1, 0] + [-1] * 8 and traffic.records == 1
    copies.begin()
    assert sum("main waits" in line for line in LOG) == 1


def test_time_is_hidden_or_exposed(quantized: OnDisk) -> None:
    copies, _ = copies_over(quantized, pinned=8, disk=Disk(quantized.checkpoint))
    traffic = Traffic()
    copies.start([Copy(0, 0, 1)], traffic=traffic)
    copies.wait()
    copies.begin()
    assert traffic.exposed_ms == 5 and traffic.hidden_ms == 0
