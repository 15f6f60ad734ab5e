"""Pinned memory within a limit, and what happens where the system refuses it."""

import torch
from torch import Tensor

from clover_local.experts.pinned import PIECE_BYTES, HostRecords, PinnedRecords, Ring
from clover_local.experts.store import ExpertStore
from clover_local.memory.sizes import shown
from tests.experts.conftest import OnDisk


class System:
    """Gives ordinary memory instead of pinned one, so many pieces."""

    def __init__(self, pieces: int = 1000) -> None:
        self.left = pieces
        self.given: list[int] = []

    def __call__(self, nbytes: int) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("CUDA error: out of memory\nlong story")
        self.given.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def sizes(*nbytes: int) -> dict[tuple[int, int], int]:
    return {(0, expert): size for expert, size in enumerate(nbytes)}


def test_records_up_to_the_limit_have_memory_of_their_own() -> None:
    records = PinnedRecords(sizes(256, 512, 256, 512, 256), limit=1600, allocate=System())
    assert list(records) == [(0, 0), (0, 1), (0, 2), (0, 3)] and records.nbytes == 1536
    for expert, key in enumerate(records):
        assert records.row(key) is None  # not filled yet
        records.fill(key, lambda into, value=expert: into.fill_(value + 1))  # type: ignore[misc]
    for expert, size in enumerate((256, 512, 256, 512)):
        row = records.row((0, expert))
        assert row is not None and len(row) == size and bool((row == expert + 1).all())
    assert records.row((0, 4)) is None and records.refused is None


def test_memory_is_taken_in_pieces_of_whole_records() -> None:
    system, size = System(), PIECE_BYTES // 3 - 256
    records = PinnedRecords(sizes(*(size,) * 7), limit=10 * PIECE_BYTES, allocate=system)
    assert len(records) == 7 and system.given == [3 * size, 3 * size, size]


def test_a_refusal_leaves_what_was_given() -> None:
    size = PIECE_BYTES // 2
    records = PinnedRecords(sizes(*(size,) * 7), limit=10 * PIECE_BYTES, allocate=System(2))
    assert len(records) == 4 and records.refused == "CUDA error: out of memory"


def test_a_ring_gives_its_entries_in_turn() -> None:
    class Sent:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    ring, events = Ring(512, nbytes=1600, allocate=System()), list[Sent]()
    assert ring.nbytes == 1536
    for turn in range(5):
        entry = ring.entry()
        assert entry.shape == (512,)
        assert [event.waited for event in events[:2]] == [turn > 2, turn > 3][: len(events)]
        events.append(Sent())
        ring.sent(events[-1])  # type: ignore[arg-type]


def test_a_read_that_failed_leaves_the_entry_to_the_next_one() -> None:
    ring = Ring(256, nbytes=0, allocate=System())
    assert ring.entry().data_ptr() == ring.entry().data_ptr()


def notes(golden: OnDisk, system: System, *, pin_bytes: int) -> str | None:
    store = ExpertStore(golden.checkpoint, golden.config, device="cpu", dtype=torch.float32)
    first = [(0, expert) for expert in range(8)]
    return HostRecords(store, first, pin_bytes=pin_bytes, ring_bytes=1 << 17, allocate=system).note


def test_what_is_not_pinned_is_said_in_one_line(golden: OnDisk) -> None:
    record = 3 * 64 * 32 * 4
    assert notes(golden, System(), pin_bytes=8 * record) is None
    assert notes(golden, System(), pin_bytes=5 * record) == (
        f"the pin limit: 3 of 8 experts come through a ring of {shown(122880)}, more slowly"
    )
    refused = notes(golden, System(0), pin_bytes=8 * record)
    assert refused == (
        "the system pins no memory (CUDA error: out of memory): experts are copied from ordinary "
        "memory, more slowly"
    )


def test_a_system_that_pins_the_ring_only_is_said_in_one_line(golden: OnDisk) -> None:
    system = System()
    system.left = 0

    def ring_only(nbytes: int) -> Tensor:
        system.left = int(nbytes == 122880)
        return system(nbytes)

    store = ExpertStore(golden.checkpoint, golden.config, device="cpu", dtype=torch.float32)
    first = [(0, expert) for expert in range(8)]
    host = HostRecords(store, first, pin_bytes=1 << 30, ring_bytes=1 << 17, allocate=ring_only)
    assert host.note == (
        f"the system pins no more than {shown(0)} (CUDA error: out of memory): 8 of 8 experts come "
        f"through a ring of {shown(122880)}, more slowly"
    )
    assert host.nbytes == 122880
