"""Belady's rule against all that could have been done, on traces small enough to try it."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from clover_local.residency.belady import belady
from clover_local.residency.trace import Forward, RoutingTrace


def small_trace(seed: int, *, experts: int = 5, forwards: int = 9) -> RoutingTrace:
    random = np.random.default_rng(seed)
    made = []
    for number in range(forwards):
        rows = np.zeros((2, experts), np.uint16)
        for layer in range(2):
            rows[layer, random.choice(experts, int(random.integers(1, 3)), replace=False)] = 1
        made.append(Forward("commit", number, 0, rows))
    return RoutingTrace(2, experts, tuple(made))


def fewest_misses(trace: RoutingTrace, kept: int) -> int:
    """By trying: after each demand any of the residents and of its experts may stay."""
    demands = [frozenset((d.experts + d.layer * trace.experts).tolist()) for d in trace.demands()]

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(demands):
            return 0
        wanted = resident | demands[number]
        stay = combinations(sorted(wanted), min(kept, len(wanted)))
        fewest = min(best(number + 1, frozenset(each)) for each in stay)
        return len(demands[number] - resident) + fewest

    return best(0, frozenset())


@pytest.mark.parametrize("kept", [1, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_has_fewer_misses(seed: int, kept: int) -> None:
    trace = small_trace(seed)
    assert belady(trace, kept=kept).decode == fewest_misses(trace, kept)


def test_with_room_for_all_only_first_uses_miss() -> None:
    trace = small_trace(1)
    used = np.array([forward.rows > 0 for forward in trace.forwards]).any(axis=0)
    assert belady(trace, kept=10).decode == used.sum()


@pytest.mark.parametrize("seed", range(4))
def test_bounds_never_help(seed: int) -> None:
    trace = small_trace(seed, experts=8, forwards=40)
    free = belady(trace, kept=6).decode
    assert belady(trace, kept=6, floor=2).decode >= free
    assert belady(trace, kept=6, floor=2, protect=True).decode >= free


def test_a_protected_block_keeps_what_it_used() -> None:
    rows = np.eye(3, dtype=np.uint16)[:, None, :]  # expert 0, 1, 2 of one layer
    order = [(0, 0), (0, 1), (0, 1), (1, 0)]
    forwards = tuple(Forward("preview", block, 0, rows[expert]) for block, expert in order)
    trace = RoutingTrace(1, 3, forwards)
    assert belady(trace, kept=1).decode == 3  # 1 stays for its second use, or 0 for its own
    assert belady(trace, kept=1, protect=True).decode == 3
    swapped = RoutingTrace(1, 3, (*forwards, forwards[1], forwards[1]))
    assert belady(swapped, kept=1).decode == 3
    assert belady(swapped, kept=1, protect=True).decode == 4


def test_prompts_are_counted_apart_and_take_free_slots_only() -> None:
    rows = np.eye(3, dtype=np.uint16)[:, None, :]
    forwards = (
        Forward("commit", 0, 0, rows[0]),
        Forward("prompt", 1, 0, rows[1]),
        Forward("commit", 1, 0, rows[1]),
        Forward("commit", 2, 0, rows[0]),
    )
    trace = RoutingTrace(1, 3, forwards)
    bounded = belady(trace, kept=1, protect=True)
    assert (bounded.decode, bounded.prompt) == (2, 1)
    assert belady(trace, kept=2, protect=True).decode == 1
