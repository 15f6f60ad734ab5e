"""Waves by Triton's kernels, in the interpreter where there is no GPU."""

import numpy as np
import pytest
import torch

from clover_local.checkpoint.load import load_parameters
from clover_local.experts.files import Files
from clover_local.experts.kernel_waves import SlotMaps
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.resident import ResidentExperts
from clover_local.experts.store import ExpertStore
from clover_local.kernels import dispatch
from clover_local.residency.pools import SlotPools, pools_of
from tests.experts.conftest import Disk, OnDisk

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_KERNELS", "triton")


def offload(on_disk: OnDisk, slots: int, disk: Disk | Files) -> OffloadedExperts:
    store = ExpertStore(
        on_disk.checkpoint, on_disk.config, device=DEVICE, dtype=torch.float32, reader=disk
    )
    tables = SlotPools(
        pools_of(store.record_bytes), store.num_experts, slots=[slots], policy="lfru"
    )
    return OffloadedExperts(store, tables, device=DEVICE)


@pytest.mark.parametrize("slots", [1, 5, 13, 32])
def test_waves_of_kernels_give_the_bits_of_resident_experts(quantized: OnDisk, slots: int) -> None:
    loaded = load_parameters(quantized.checkpoint, quantized.config, device=DEVICE)
    resident = ResidentExperts(loaded.experts)
    disk = Disk(quantized.checkpoint)
    experts = offload(quantized, slots, disk)
    torch.manual_seed(slots)
    for block in range(2):
        experts.begin("preview", block=block)
        for layer in (0, 3):
            x = torch.randn(5, 64, device=DEVICE)
            routing = dispatch.route(torch.randn(5, 8, device=DEVICE), top_k=2)
            if block == layer == 0:
                disk.fails_at = 3
                with pytest.raises(KeyboardInterrupt):
                    experts.forward(layer, x, routing=routing)
            got = experts.forward(layer, x, routing=routing).sum()
            assert torch.equal(got, resident.forward(layer, x, routing=routing).sum())
        experts.resize(max(experts.least_slots, slots - 1))
    assert experts.stats().copied.records > 0


def test_a_map_is_sent_only_where_an_expert_in_use_has_moved() -> None:
    maps = SlotMaps([2, 5], 4, device=DEVICE)
    sent = maps.of(5, np.array([1, 3]), slots=np.array([7, -1]))
    assert sent.tolist() == [-1, 7, -1, -1]
    sent.fill_(9)  # would show if it were sent again
    assert maps.of(5, np.array([1]), slots=np.array([7])).tolist() == [9] * 4
    assert maps.of(5, np.array([1, 2]), slots=np.array([7, 0])).tolist() == [-1, 7, 0, -1]
    assert maps.of(2, np.array([0]), slots=np.array([3])).tolist() == [3, -1, -1, -1]
    assert maps.nbytes == 2 * 4 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_overlap_and_are_timed_on_a_gpu(quantized: OnDisk) -> None:
    disk = Files(shard.path for shard in quantized.checkpoint.shards)
    experts = offload(quantized, 9, disk)
    experts.fill()
    experts.begin("prompt", block=0)
    for layer in range(4):
        routing = dispatch.route(torch.randn(9, 8, device=DEVICE), top_k=2)
        experts.forward(layer, torch.randn(9, 64, device=DEVICE), routing=routing)
    torch.cuda.synchronize()
    assert experts.stats().copied.hidden_ms + experts.stats().copied.exposed_ms > 0
