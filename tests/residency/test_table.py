"""Slots of a table: what is copied, kept, evicted and refused."""

import numpy as np
import pytest

from clover_local.residency.demand import Demand, Kind
from clover_local.residency.names import POLICY_NAMES
from clover_local.residency.table import SlotTable, passing_slots
from tests.residency.conftest import Device, demand, table


def resident(slots: SlotTable, layer: int) -> set[int]:
    return set(np.flatnonzero(slots.slot_of[layer] >= 0).tolist())


def random_demand(random: np.random.Generator, step: int, *, layers: int, experts: int) -> Demand:
    kinds: tuple[Kind, ...] = ("preview", "preview", "preview", "commit", "prompt")
    count = int(random.integers(1, experts + 1))
    ids = np.sort(random.choice(experts, count, replace=False))
    return Demand(
        int(random.integers(layers)),
        ids,
        np.ones(count, np.int64),
        kinds[int(random.integers(len(kinds)))],
        block=step // 12,
        number=step % 12,
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 12, 20, 33, 35])
def test_every_expert_is_computed_once_from_its_own_record(policy: str, slots: int) -> None:
    layers, experts = 5, 7
    random = np.random.default_rng(slots)
    device = Device(table(layers, experts, slots=slots, policy=policy))
    for step in range(300):
        device.run(random_demand(random, step, layers=layers, experts=experts))
        device.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_random_resizes_in_the_middle_of_blocks_lose_no_record_unsaid(policy: str) -> None:
    layers, experts = 4, 9
    random = np.random.default_rng(3)
    device = Device(table(layers, experts, slots=20, policy=policy))
    for step in range(300):
        device.run(random_demand(random, step, layers=layers, experts=experts))
        if step % 5 == 0:
            before = set(np.flatnonzero(device.table.slot_of.ravel() >= 0).tolist())
            lost = device.resize(int(random.integers(1, layers * experts + 1))).lost
            after = set(np.flatnonzero(device.table.slot_of.ravel() >= 0).tolist())
            assert before - after == set(lost.tolist())
        device.check()


def test_the_same_demands_are_served_the_same_way_twice() -> None:
    first, second = (Device(table(4, 9, slots=17, policy="lfru")) for _ in range(2))
    random = np.random.default_rng(5)
    for step in range(200):
        asked = random_demand(random, step, layers=4, experts=9)
        first.run(asked)
        second.run(asked)
        assert first.content == second.content


def test_later_passes_copy_only_what_is_new_to_the_block() -> None:
    device = Device(table(2, 16, slots=24))
    for block in range(3):
        used: set[tuple[int, int]] = set()
        for number in range(4):
            for layer in range(2):
                ids = sorted({(block + number + i) % 16 for i in range(8)})
                before = resident(device.table, layer)
                admission = device.run(demand(layer, ids, block=block, number=number))
                new = {(layer, expert) for expert in ids} - used
                assert admission.misses == len({e for _, e in new} - before)
                used |= {(layer, expert) for expert in ids}


def test_nothing_the_block_has_used_is_evicted() -> None:
    slots = table(1, 10, slots=6, passing=2)  # four are kept
    slots.admit(demand(0, [0, 1, 2, 3]))
    admission = slots.admit(demand(0, [4, 5], number=1))
    assert (admission.refused, len(admission.evicted)) == (2, 0)
    assert resident(slots, 0) == {0, 1, 2, 3}
    admission = slots.admit(demand(0, [4, 5], block=1))
    assert (admission.refused, admission.evicted.tolist()) == (0, [0, 1])


def test_a_need_beyond_the_slots_is_computed_in_waves() -> None:
    device = Device(table(1, 12, slots=6, passing=4))
    admission = device.run(demand(0, range(9)))
    assert [len(wave.experts) for wave in admission.waves] == [4, 2, 2, 1]
    halves = [set(wave.slots.tolist()) - {0, 1} for wave in admission.waves]
    assert halves == [{2, 3}, {4, 5}, {2, 3}, {4}]  # one half is filled while the other is read


def test_a_prompt_evicts_nothing_but_may_fill_free_slots() -> None:
    device = Device(table(2, 8, slots=10, passing=2))
    device.run(demand(0, [0, 1, 2, 3]))
    assert device.run(demand(1, range(8), "prompt")).refused == 4
    before = device.table.slot_of
    admission = device.run(demand(1, range(8), "prompt", block=1))
    assert (admission.hits, admission.refused, len(admission.evicted)) == (4, 4, 0)
    assert np.array_equal(device.table.slot_of, before)


def test_a_prompt_protects_nothing_and_teaches_the_policy_nothing() -> None:
    slots = table(1, 8, slots=6, passing=2, policy="lru")
    slots.admit(demand(0, [0, 1]))
    slots.admit(demand(0, [2, 3], block=1))
    taught = slots.policy.values(np.arange(8))
    slots.admit(demand(0, [0, 1], "prompt", block=2))
    assert np.array_equal(slots.policy.values(np.arange(8)), taught)
    assert slots.admit(demand(0, [4], block=2)).evicted.tolist() == [0]


def test_the_sweep_of_one_layer_leaves_the_others_their_floor() -> None:
    slots = table(3, 20, slots=20, passing=2, floor=4)
    for layer in range(3):
        slots.admit(demand(layer, range(6)))
    for block in range(1, 9):
        slots.admit(demand(2, range(2 * block, 2 * block + 4), block=block))
    assert [len(resident(slots, layer)) for layer in range(3)] == [4, 4, 10]


def test_a_layer_at_its_floor_still_exchanges_its_own_experts() -> None:
    slots = table(2, 10, slots=10, passing=2, floor=4)
    for layer in range(2):
        slots.admit(demand(layer, range(4)))
    admission = slots.admit(demand(0, [7, 8, 9], block=1))
    assert admission.evicted.tolist() == [0, 1, 2]
    assert admission.refused == 0


def test_a_layer_grown_beyond_its_floor_gives_again() -> None:
    slots = table(2, 10, slots=10, passing=2, floor=3)
    slots.admit(demand(0, range(5)))
    slots.admit(demand(1, range(3)))
    slots.admit(demand(0, [9], block=1))  # from its own, as layer 1 is at its floor
    assert slots.admit(demand(1, [8, 9], block=1)).evicted.tolist() == [1, 2]
    admission = slots.admit(demand(0, [5, 6], block=1))
    assert admission.evicted.tolist() == [3, 4]
    assert slots.admit(demand(0, [7], block=1)).evicted.tolist() == [10]


def test_permanent_experts_are_never_evicted() -> None:
    slots = table(1, 12, slots=6, passing=2, permanent=[(0, 0), (0, 1)])
    slots.place(0, np.arange(4), evict=False)
    for block in range(5):
        slots.admit(demand(0, [4 + block, 5 + block], block=block))
        assert resident(slots, 0) >= {0, 1}


def test_placing_fills_free_slots_and_counts_nothing() -> None:
    slots = table(1, 8, slots=6, passing=2)
    wave, evicted = slots.place(0, np.array([1, 3, 5, 6, 7]), evict=False)
    assert (wave.experts.tolist(), wave.copied.tolist()) == ([1, 3, 5, 6], [0, 1, 2, 3])
    assert not len(evicted) and not slots.counts
    assert slots.admit(demand(0, [1, 3])).misses == 0


def test_placing_ahead_evicts_only_what_is_worth_less() -> None:
    slots = table(1, 8, slots=6, passing=2, policy="static")
    slots.place(0, np.array([2, 3, 6, 7]), evict=False)
    wave, evicted = slots.place(0, np.array([0, 4, 5]), evict=True)
    assert (wave.experts.tolist(), evicted.tolist()) == ([0, 4], [7, 6])


def test_shrinking_gives_up_what_the_block_has_not_used_first() -> None:
    device = Device(table(1, 10, slots=10, passing=2))
    device.run(demand(0, range(8)))
    device.run(demand(0, [0, 1, 2], block=1))
    resized = device.resize(6)
    assert resized.lost.tolist() == [3, 4, 5, 6, 7][:4]
    assert len(resized.moves) == sum(device.table.slot_of[0] >= 0) - 3
    device.check()
    device.resize(10)
    assert device.table.resident == 4


def test_a_table_for_all_experts_needs_no_passing_slots() -> None:
    slots = table(2, 4, slots=8)
    assert (slots.passing, slots.kept) == (0, 8)
    assert [passing_slots(n, experts=10_240) for n in (1, 2, 100, 2560, 8000)] == [1, 2, 2, 32, 32]


def test_counts_are_by_kind() -> None:
    slots = table(1, 8, slots=6, passing=2)
    slots.admit(demand(0, range(5)))
    slots.admit(demand(0, range(4), "commit", number=1))
    preview, commit = slots.counts["preview"], slots.counts["commit"]
    assert (preview.hits, preview.misses, preview.refused, preview.hit_rate) == (0, 5, 1, 0.0)
    assert (commit.hits, commit.misses, commit.hit_rate) == (4, 0, 1.0)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="0 slots for 2 layers"):
        table(2, 4, slots=0)
    with pytest.raises(ValueError, match="5 passing slots of 4"):
        table(2, 4, slots=4, passing=5)
    slots = table(2, 4, slots=4)
    with pytest.raises(ValueError, match="1 experts of layer 7"):
        slots.admit(demand(7, [0]))
    with pytest.raises(ValueError, match="0 experts of layer 1"):
        slots.admit(demand(1, []))
    with pytest.raises(ValueError, match="0 slots"):
        slots.resize(0)
