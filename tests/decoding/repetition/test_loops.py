"""Signs of a loop, and what was good before it."""

import random

import pytest

from clover_local.decoding.repetition.loops import good_length, loops

PROSE = random.Random(3).choices(range(2000), k=400)


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_a_block_of_short_rounds_loops_by_itself(period: int) -> None:
    block = [*range(period)] * 32
    assert loops(PROSE, block[:32])


@pytest.mark.parametrize("period", [5, 13, 40, 90])
def test_longer_rounds_loop_the_fourth_time(period: int) -> None:
    tokens = PROSE[:50] + PROSE[100 : 100 + period] * 16
    loop = [n for n in range(32, len(tokens), 32) if loops(tokens[: n - 32], tokens[n - 32 : n])]
    assert loop, "never found"
    assert 50 + 2 * period <= loop[0] <= 50 + 4 * max(period, 16) + 32


def test_prose_and_a_list_do_not_loop() -> None:
    assert not any(loops(PROSE[: n - 32], PROSE[n - 32 : n]) for n in range(32, 400, 32))
    entries = [token for i in range(60) for token in (7, 8, 9, 1000 + i, 10, 11)]
    assert not any(loops(entries[: n - 32], entries[n - 32 : n]) for n in range(32, 360, 32))
    assert not loops([], [5] * 10)


@pytest.mark.parametrize(
    ("response", "block", "good"),
    [
        (PROSE[:40], [1, 2, 3, *[7] * 29], 4),
        (PROSE[:40], [1, 2, *[7, 8] * 15], 4),
        ([*PROSE[:40], *[7] * 20], [7] * 32, 0),
        ([], [7] * 32, 1),
        (PROSE[:40], PROSE[50:82], 0),
    ],
)
def test_the_first_round_of_a_loop_is_kept(
    response: list[int], block: list[int], good: int
) -> None:
    assert good_length(response, block) == good
