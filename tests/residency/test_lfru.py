"""When `lfru` lets a newcomer in, and how it weighs many uses against recent ones."""

import numpy as np

from clover_local.residency.demand import Kind
from clover_local.residency.lfru import Lfru, Reuse
from tests.residency.conftest import demand


def learned(blocks: list[list[list[int]]]) -> Reuse:
    """After blocks of forwards of expert ids, the last forward of each a commit."""
    reuse = Reuse(1, 16)
    for number, block in enumerate(blocks):
        for place, ids in enumerate(block):
            kind: Kind = "commit" if place == len(block) - 1 else "preview"
            asked = demand(0, ids, kind, block=number, number=place)
            reuse.used(asked.experts, asked)
        reuse.end_block()
    return reuse


def test_newcomers_repay_in_long_blocks_of_like_passes() -> None:
    reuse = learned([[[0, 1, 2, 3]] * 8] * 40)
    assert [reuse.repays(demand(0, [5], number=n)) for n in (0, 1, 5)] == [True] * 3


def test_newcomers_do_not_repay_where_the_commit_needs_others() -> None:
    reuse = learned([[[0, 1, 2, 3], list(range(3, 16))]] * 40)
    assert not reuse.repays(demand(0, [5]))


def test_a_commit_is_the_end_of_its_block() -> None:
    reuse = learned([[[0, 1, 2, 3]] * 8] * 40)
    assert not reuse.repays(demand(0, [5], "commit", number=7))


def test_a_newcomer_that_does_not_repay_bids_its_own_value() -> None:
    policy = Lfru(np.zeros((1, 16)))
    for block in range(50):
        for number, ids in enumerate([[0], [0, 1] if block % 2 else [0]]):
            asked = demand(0, ids, "commit" if number else "preview", block, number)
            policy.used(asked.experts, asked)
        policy.end_block()
    asked = demand(0, [2, 3], "commit", block=50)
    policy.used(asked.experts, asked)
    often, seldom, newcomer = (
        float(policy.values(np.array([0]))[0]),
        float(policy.values(np.array([1]))[0]),
        float(policy.bids(np.array([2]), asked)[0]),
    )
    assert newcomer < seldom < often


def test_one_block_of_many_passes_counts_less_than_many_blocks() -> None:
    policy = Lfru(np.zeros((1, 16)))
    for block in range(20):
        for number in range(20):
            ids = [1] if block == 10 else [0] if number == 0 and block % 2 else [5]
            asked = demand(0, ids, block=block, number=number)
            policy.used(asked.experts, asked)
        policy.end_block()
    many, once = policy.values(np.array([0, 1]))
    assert many > once
