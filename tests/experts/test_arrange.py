"""A memory plan becomes slots that are filled, in one pass over the files, as it counted them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clover_local.checkpoint.summary import summarize
from clover_local.experts.arrange import by_use, off_device, offload, permanent_of
from clover_local.experts.offloaded import READ_AHEAD
from clover_local.experts.store import ExpertStore
from clover_local.memory.model_bytes import ModelBytes, from_summary
from clover_local.memory.parts import MAPS, SLOTS, STREAM, Budget, Plan
from clover_local.memory.planner import least_device_bytes, plan
from clover_local.residency.profile import Profile
from tests.experts.conftest import Disk, OnDisk, model_over, run, same


def model_bytes(on_disk: OnDisk) -> ModelBytes:
    return from_summary(on_disk.config, summarize(on_disk.checkpoint), number_bytes=4)


def planned(on_disk: OnDisk, *, share: float) -> Plan:
    """A plan that has room for `share` of the experts besides the least that the model needs."""
    model = model_bytes(on_disk)
    budget = Budget(device=1 << 40, host=1 << 34, context=64, prefill_rows=32, cuda=False)
    least = least_device_bytes(model, budget)
    made = plan(model, replace(budget, device=least + int(share * model.experts)))
    assert made.fits
    return made


def store_of(on_disk: OnDisk, disk: Disk) -> ExpertStore:
    return ExpertStore(
        on_disk.checkpoint, on_disk.config, device="cpu", dtype=torch.float32, reader=disk
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_slots_and_bytes_are_those_of_the_plan(quantized: OnDisk, share: float) -> None:
    made, disk = planned(quantized, share=share), Disk(quantized.checkpoint)
    experts = offload(store_of(quantized, disk), made, device="cpu")
    stats = experts.stats()
    parts = made.device_parts
    assert stats.device_bytes == pytest.approx(
        parts[SLOTS] + parts.get(STREAM, 0), rel=0.01, abs=parts[MAPS]
    )
    assert stats.resident == stats.slots - stats.passing == stats.filled.records
    assert same(run(model_over(quantized, experts)), run(model_over(quantized, None)))


def test_everything_is_read_once_and_about_in_the_order_of_the_files(quantized: OnDisk) -> None:
    made, disk = planned(quantized, share=0.5), Disk(quantized.checkpoint)
    store, progress = store_of(quantized, disk), list[tuple[int, int]]()
    experts = offload(store, made, device="cpu", on_progress=lambda *now: progress.append(now))
    assert len(disk.reads) == len(set(disk.reads))
    places = [sorted(disk.reads).index(read) for read in disk.reads]
    assert all(abs(place - at) < READ_AHEAD for at, place in enumerate(places))
    filled = experts.stats().filled
    assert progress[-1] == (filled.bytes, filled.bytes) and len(progress) == filled.records


def test_a_profile_says_who_is_placed_first_and_stays(golden: OnDisk) -> None:
    made, disk = planned(golden, share=0.5), Disk(golden.checkpoint)
    uses = np.random.default_rng(2).permutation(32).reshape(4, 8)
    store = store_of(golden, disk)
    order = by_use(store, Profile(32, uses))
    assert [uses[key] for key in order] == list(range(31, -1, -1))
    permanent = permanent_of(made, order)
    for layer, count in enumerate(made.permanent_per_layer):
        best = np.argsort(-uses[layer])[:count].tolist()
        assert [expert for at, expert in permanent if at == layer] == best
    experts = offload(store, made, device="cpu", profile=Profile(32, uses), policy="static")
    run(model_over(golden, experts))
    slot_of = experts._tables.tables[0].slot_of
    assert all(slot_of[key] >= 0 for key in permanent)


def test_what_starts_without_a_slot_is_pinned_first_and_what_never_leaves_is_not() -> None:
    first = [(0, expert) for expert in range(6)]
    assert off_device(first, permanent=2, slots=4) == [(0, 4), (0, 5), (0, 3), (0, 2)]
