"""Slots know what is really in them, also after moves, resizes and reads that failed."""

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.experts.record import ExpertFormat, Layout, joined_layout
from clover_local.experts.slots import EMPTY, MatrixSlots, RecordSlots, are_blocked

CPU = torch.device("cpu")
LAYOUT = joined_layout(ExpertFormat(8, 4, torch.float32, torch.float32))
NO_MOVES = np.empty((0, 2), np.int64)


def filled(kind: str, count: int) -> RecordSlots | MatrixSlots:
    slots: RecordSlots | MatrixSlots = MatrixSlots(count, LAYOUT.nbytes)
    if kind == "records":
        slots = RecordSlots(count, LAYOUT.nbytes, device=CPU)
    for slot in range(count):
        put(slots, slot, 10 + slot)
    return slots


def put(slots: RecordSlots | MatrixSlots, slot: int, key: int) -> None:
    slots.put(slot, key, LAYOUT, read=lambda into: write(into, key))


def write(into: Tensor, key: int) -> None:
    into[: LAYOUT.nbytes].view(torch.float32).fill_(key)


def content(slots: RecordSlots | MatrixSlots, slot: int, layout: Layout = LAYOUT) -> float:
    gate_up, _, members = slots.matrices(np.array([slot]), layout)
    weight = gate_up.weights[int(members[0])]
    assert isinstance(weight, Tensor)
    return float(weight[0, 0])


@pytest.mark.parametrize("kind", ["records", "matrices"])
def test_a_failed_read_leaves_a_slot_that_claims_nothing(kind: str) -> None:
    slots = filled(kind, 3)

    def fail(into: Tensor) -> None:
        into[:7] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slots.put(1, 99, LAYOUT, read=fail)
    assert slots.holds.tolist() == [10, EMPTY, 12]
    put(slots, 1, 99)
    assert slots.holds.tolist() == [10, 99, 12] and content(slots, 1) == 99


@pytest.mark.parametrize("kind", ["records", "matrices"])
def test_a_resize_keeps_and_moves_records(kind: str) -> None:
    slots = filled(kind, 5)
    assert content(slots, 4) == 14
    slots.resize(3, np.array([[4, 1]]))
    assert slots.holds.tolist() == [10, 14, 12]
    assert [content(slots, slot) for slot in range(3)] == [10, 14, 12]
    assert slots.nbytes == 3 * LAYOUT.nbytes
    slots.resize(6, NO_MOVES)
    assert slots.holds.tolist() == [10, 14, 12, EMPTY, EMPTY, EMPTY]
    put(slots, 5, 77)
    assert content(slots, 5) == 77


def test_without_room_for_both_the_old_slots_go_first() -> None:
    room = 6 * LAYOUT.nbytes
    taken: list[Tensor] = []

    def allocate(shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        live = slots.records.nbytes if taken else 0
        if live + shape[0] * shape[1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append(torch.zeros(shape, dtype=dtype, device=device))
        return taken[-1]

    slots = RecordSlots(4, LAYOUT.nbytes, device=CPU, allocate=allocate)
    put(slots, 0, 10)
    slots.resize(5, NO_MOVES)
    assert slots.holds.tolist() == [EMPTY] * 5 and len(slots.records) == 5
    with pytest.raises(torch.OutOfMemoryError):
        slots.resize(7, NO_MOVES)
    slots.resize(4, NO_MOVES)
    put(slots, 3, 8)
    assert slots.holds.tolist() == [EMPTY, EMPTY, EMPTY, 8] and content(slots, 3) == 8


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch has no oneDNN",
)
def test_only_large_plain_matrices_on_a_cpu_are_blocked() -> None:
    large = joined_layout(ExpertFormat(512, 300, torch.float32, torch.float32))
    assert are_blocked(large, device=CPU)
    assert not are_blocked(LAYOUT, device=CPU)
    assert not are_blocked(large, device=torch.device("meta"))
    half = joined_layout(ExpertFormat(512, 300, torch.bfloat16, torch.bfloat16))
    assert not are_blocked(half, device=CPU)
