"""Copies at once, counted one by one."""

import pytest
import torch

from clover_local.experts.copies import Copy, DirectCopies, key_of
from clover_local.experts.slots import RecordSlots
from clover_local.experts.store import ExpertStore
from clover_local.experts.traffic import Traffic
from tests.experts.conftest import Disk, OnDisk


def test_copies_before_a_failure_are_made_and_counted(golden: OnDisk) -> None:
    disk = Disk(golden.checkpoint)
    store = ExpertStore(
        golden.checkpoint, golden.config, device="cpu", dtype=torch.float32, reader=disk
    )
    slots = RecordSlots(4, store.record_bytes[0], device=torch.device("cpu"))
    copies, traffic = DirectCopies(store, slots), Traffic()
    disk.fails_at = 5  # of an expert's three matrices the last, in the second record
    with pytest.raises(KeyboardInterrupt):
        copies.start([Copy(1, 3, 2), Copy(0, 4, 0), Copy(0, 5, 1)], traffic=traffic)
    assert slots.holds.tolist() == [-1, -1, key_of(1, 3, 8), -1]
    assert traffic.records == 1 and traffic.bytes == store.record_bytes[0]
    copies.start([Copy(0, 4, 0)], traffic=traffic)
    assert slots.holds.tolist() == [4, -1, 11, -1] and traffic.records == 2
    assert traffic.exposed_ms > 0 == traffic.hidden_ms
