"""Records travel to their slots whole, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gpu.experts.copy_records import (
    CopyConfig,
    copy_records,
    gate_cases,
    gather_records,
)

SMALL = CopyConfig(programs=3, chunk_bytes=64, num_warps=1)


def store_and_slots(device: str, *, record_bytes: int = 176) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    store = torch.randint(256, (7, record_bytes), dtype=torch.uint8, generator=generator)
    store = store if device == "cpu" else store.pin_memory()
    return store, torch.full((5, record_bytes), 99, dtype=torch.uint8, device=device)


def pairs(*copies: tuple[int, int], device: str) -> Tensor:
    return torch.tensor(copies, dtype=torch.int32, device=device)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_records_as_counted_are_copied(count: int, device: str) -> None:
    store, slots = store_and_slots(device)
    copies = [(6, 0), (2, 4), (0, 1)]
    expected = slots.clone()
    copy_records(store, expected, copies=copies[:count])
    gather_records(
        store,
        slots,
        copies=pairs(*copies, device=device),
        copy_count=torch.tensor([count], dtype=torch.int32, device=device),
        config=SMALL,
    )
    assert torch.equal(slots, expected)
    for record, slot in copies[:count]:
        assert torch.equal(slots[slot].cpu(), store[record])
    assert (slots[3] == 99).all()


def test_pairs_that_name_nothing_and_counts_too_high_do_nothing(device: str) -> None:
    store, slots = store_and_slots(device)
    gather_records(
        store,
        slots,
        copies=pairs((-1, 0), (7, 1), (3, -1), (3, 5), (4, 2), device=device),
        copy_count=torch.tensor([999], dtype=torch.int32, device=device),
        config=SMALL,
    )
    assert torch.equal(slots[2].cpu(), store[4])
    assert (slots[[0, 1, 3, 4]] == 99).all()


@pytest.mark.parametrize(
    ("store", "slots", "message"),
    [
        (torch.zeros(2, 24), torch.zeros(2, 24), "torch.float32"),
        (torch.zeros(2, 24).byte(), torch.zeros(2, 24).byte(), "records of 24 bytes"),
        (torch.zeros(2, 32).byte(), torch.zeros(2, 16).byte(), "32 bytes and slots of 16"),
        (torch.zeros(2, 32).byte()[:, :16], torch.zeros(2, 16).byte(), "strides (32, 1)"),
        (
            torch.zeros(40).byte()[8:].view(2, 16),
            torch.zeros(2, 16).byte(),
            "starts 8 bytes",
        ),
        (torch.zeros(16).byte(), torch.zeros(2, 16).byte(), "store is [16]"),
    ],
)
def test_records_that_cannot_be_copied_in_words_are_refused(
    store: Tensor, slots: Tensor, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        copy_records(store, slots, copies=[])
    assert message in str(caught.value)


def test_wrong_lists_are_refused() -> None:
    store, slots = store_and_slots("cpu")
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="record 7 to slot 0: there are 7 and 5"):
        copy_records(store, slots, copies=[(7, 0)])
    with pytest.raises(ValueError, match=r"copies is torch\.int64"):
        gather_records(store, slots, copies=torch.zeros(1, 2).long(), copy_count=one)
    with pytest.raises(ValueError, match="copy_count has 2"):
        gather_records(store, slots, copies=pairs((0, 0), device="cpu"), copy_count=one.repeat(2))


def test_the_gate_has_the_real_record() -> None:
    (case,) = gate_cases()
    assert case.constexprs["RECORD"] * 8 == 3 * 512 * 2048 // 2 + 3 * 512 * 2048 // 128 * 2
