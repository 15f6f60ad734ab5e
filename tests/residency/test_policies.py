"""Which resident a policy lets go first, and whom it does not let in."""

import numpy as np
import pytest

from clover_local.residency.names import DEFAULT_POLICY, POLICY_NAMES
from clover_local.residency.policies import Policy, make_policy
from tests.residency.conftest import demand, table


def used(name: str, *, last: int | None = None) -> Policy:
    """Expert 0 in ten blocks, 1 and 2 in the one after, 1 in more of its passes; then `last`."""
    made = make_policy(name, layers=1, num_experts=10)
    blocks = [[[0]]] * 10 + [[[1, 2], [1], [1]]] + ([] if last is None else [[[last]]])
    for block, forwards in enumerate(blocks):
        for number, ids in enumerate(forwards):
            asked = demand(0, ids, block=block, number=number)
            made.used(asked.experts, asked)
        made.end_block()
    return made


def first_to_go(policy: Policy) -> int:
    return int(np.argmin(policy.values(np.arange(3))))


@pytest.mark.parametrize(
    ("policy", "first"), [("lru", 0), ("block_lru", 0), ("lfu", 2), ("lfru", 2)]
)
def test_who_goes_first(policy: str, first: int) -> None:
    assert first_to_go(used(policy)) == first


def test_block_lru_lets_the_one_of_fewer_passes_go_first() -> None:
    assert first_to_go(used("block_lru", last=0)) == 2


def test_static_keeps_the_profile_whatever_is_used() -> None:
    slots = table(1, 10, slots=6, passing=2, policy="static")
    for block in range(20):
        slots.admit(demand(0, [[2, 8, 9], [0, 1, 3]][block % 2], block=block))
    assert np.flatnonzero(slots.slot_of[0] >= 0).tolist() == [0, 1, 2, 3]
    assert slots.admit(demand(0, [8, 9], block=20)).refused == 2


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_profile_decides_where_nothing_has_been_used(policy: str) -> None:
    prior = np.array([[0.5, 0.1, 0.9, 0.3]])
    made = make_policy(policy, layers=1, num_experts=4, prior=prior)
    assert np.argsort(made.values(np.arange(4))).tolist() == [1, 3, 0, 2]


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="policy mru is unknown"):
        make_policy("mru", layers=1, num_experts=4)
    with pytest.raises(ValueError, match="it needs one"):
        make_policy("static", layers=1, num_experts=4)
    with pytest.raises(ValueError, match=r"shape \(2, 4\), the table is \(1, 4\)"):
        make_policy("lru", layers=1, num_experts=4, prior=np.zeros((2, 4)))


def test_the_default_is_a_policy() -> None:
    assert DEFAULT_POLICY in POLICY_NAMES
