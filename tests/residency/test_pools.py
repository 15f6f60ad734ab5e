"""Layers of several record sizes: a pool each, and one budget for all."""

import numpy as np
import pytest

from clover_local.residency.pools import Pool, SlotPools, pools_of, split_slots
from clover_local.residency.profile import Profile
from tests.residency.conftest import demand


def test_layers_of_one_size_share_a_pool() -> None:
    assert pools_of([30, 20, 30, 20]) == (Pool(20, (1, 3)), Pool(30, (0, 2)))


def test_a_profile_seeds_every_pool_with_the_shares_of_its_layers() -> None:
    profile = Profile(2, np.array([[1, 0, 0], [0, 0, 2]]))
    small, large = SlotPools(
        pools_of([30, 20]), 3, slots=[2, 2], policy="static", profile=profile
    ).tables
    assert small.policy.values(np.arange(3)).tolist() == [0.0, 0.0, 1.0]
    assert large.policy.values(np.arange(3)).tolist() == [0.5, 0.0, 0.0]


def test_counts_are_those_of_all_pools() -> None:
    made = SlotPools(pools_of([30, 20, 30]), 4, slots=[3, 6], policy="lru", passing=1)
    small, large = made.tables
    small.admit(demand(1, [0, 1]))
    large.admit(demand(0, [2, 3]))
    large.admit(demand(2, [2, 3]))
    assert (small.resident, large.resident) == (2, 4)
    assert made.counts["preview"].misses == 6


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
    table = made.tables[0]  # of layer 1, whose records are the smaller ones
    table.place(1, np.array([5]), evict=False)
    for block in range(4):
        table.admit(demand(1, [block], block=block))
    assert table.slot_of[0, 5] >= 0
