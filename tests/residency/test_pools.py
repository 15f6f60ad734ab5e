"""Layers of several record sizes: a pool each, and one budget for all."""

import numpy as np
import pytest

from clover_local.residency.pools import Pool, SlotPools, pools_of, split_slots
from tests.residency.conftest import demand


def test_layers_of_one_size_share_a_pool() -> None:
    assert pools_of([30, 20, 30, 20]) == (Pool(20, (1, 3)), Pool(30, (0, 2)))


def test_a_layer_is_served_from_its_own_pool() -> None:
    made = SlotPools(pools_of([30, 20, 30]), 4, slots=[3, 6], policy="lru", passing=1)
    made.admit(demand(1, [0, 1]))
    made.admit(demand(0, [2, 3]))
    made.admit(demand(2, [2, 3]))
    assert made.table_of(1).resident == 2
    assert made.table_of(0) is made.table_of(2)
    assert made.table_of(0).resident == 4
    assert made.counts["preview"].misses == 6
    assert made.copied_bytes == 2 * 20 + 4 * 30


def test_the_profile_is_in_the_order_of_layers() -> None:
    made = SlotPools(pools_of([30, 20]), 3, slots=[2, 2], policy="lfru")
    for layer, experts in ((0, [0]), (1, [2])):
        made.admit(demand(layer, experts))
    profile = made.profile()
    assert (profile.forwards, profile.uses.tolist()) == (1, [[1, 0, 0], [0, 0, 1]])
    seeded = SlotPools(pools_of([30, 20]), 3, slots=[2, 2], policy="static", profile=profile)
    values = seeded.table_of(1).policy.values(np.arange(3))
    assert values.tolist() == [0.0, 0.0, 1.0]


def test_every_pool_gets_the_same_share() -> None:
    pools = pools_of([30, 20, 30, 20])
    half = (2 * 8 * 20 + 2 * 8 * 30) // 2
    assert split_slots(pools, 8, memory=half) == [8, 8]
    assert split_slots(pools, 8, memory=10**9) == [16, 16]
    assert split_slots(pools, 8, memory=50) == [1, 1]
    with pytest.raises(ValueError, match="49 bytes of slots, one of each size takes 50"):
        split_slots(pools, 8, memory=49)


def test_permanent_experts_stay_with_their_layer() -> None:
    made = SlotPools(
        pools_of([30, 20]), 6, slots=[3, 3], policy="lru", passing=1, permanent=[(1, 5)]
    )
    made.table_of(1).place(1, np.array([5]), evict=False)
    for block in range(4):
        made.admit(demand(1, [block], block=block))
    assert made.table_of(1).slot_of[0, 5] >= 0
