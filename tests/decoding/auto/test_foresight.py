"""What the other mode would have needed."""

import pytest

from clover_local.decoding.auto.foresight import (
    PassesForRounds,
    Rounds,
    rounds_for_block,
    unsure,
)
from clover_local.decoding.events import PassDone
from clover_local.decoding.result import Fixed

M = -7


def passes(*made: tuple[list[int], dict[int, tuple[int, float]]]) -> list[PassDone]:
    """Per pass the block behind it, and the picked rows: row -> (token, confidence)."""
    return [
        PassDone(
            0, 0, number, tuple(block), (), 1.0,
            tuple(Fixed(row, token, sure) for row, (token, sure) in picked.items()),
        )
        for number, (block, picked) in enumerate(made)
    ]  # fmt: skip


def test_a_block_whose_first_pass_is_right_takes_one_round() -> None:
    block = [1, 2, 3, 4]
    one = passes((block, {row: (token, 0.99) for row, token in enumerate(block)}))
    assert rounds_for_block(one, block, width=16, threshold=0.95) == Rounds(1, 0)


def test_a_round_ends_behind_the_first_wrong_proposal() -> None:
    """Pass 0 proposes 1 9 3 4, of which 9 is wrong: 1 is kept, and the boundary token 2 comes."""
    two = passes(
        ([1, M, M, M], {0: (1, 0.99), 1: (9, 0.4), 2: (3, 0.9), 3: (4, 0.9)}),
        ([1, 2, 3, 4], {1: (2, 0.99), 2: (3, 0.99), 3: (4, 0.99)}),
    )
    # Behind 1 2 there is no pass that had both resolved: the last one stands for it.
    assert rounds_for_block(two, [1, 2, 3, 4], width=16, threshold=0.95) == Rounds(2, 1)


def test_the_next_round_proposes_what_the_pass_did_that_knew_as_much() -> None:
    three = passes(
        ([1, M, M, M], {0: (1, 0.99), 1: (8, 0.4), 2: (8, 0.4), 3: (8, 0.4)}),
        ([1, 2, M, M], {1: (2, 0.99), 2: (8, 0.3), 3: (8, 0.3)}),
        ([1, 2, 3, 4], {2: (3, 0.8), 3: (4, 0.97)}),
    )
    assert rounds_for_block(three, [1, 2, 3, 4], width=16, threshold=0.95) == Rounds(2, 2)


@pytest.mark.parametrize(("width", "rounds"), [(1, 6), (2, 3), (4, 2), (8, 1), (32, 1)])
def test_a_round_makes_at_most_as_many_tokens_as_it_has_rows(width: int, rounds: int) -> None:
    block = [1, 2, 3, 4, 5, 6]
    one = passes((block, {row: (token, 0.99) for row, token in enumerate(block)}))
    assert rounds_for_block(one, block, width=width, threshold=0.95).count == rounds


def test_only_emitted_rows_count() -> None:
    one = passes(([1, 2, 3, 4], {0: (1, 0.99), 1: (2, 0.9), 2: (9, 0.1), 3: (9, 0.1)}))
    assert rounds_for_block(one, [1, 2], width=16, threshold=0.95) == Rounds(1, 1)
    assert rounds_for_block(one, [], width=16, threshold=0.95) == Rounds(0, 0)


def test_a_row_at_the_threshold_is_not_sure() -> None:
    picked = [Fixed(0, 1, 0.95), Fixed(1, 1, 0.96), Fixed(2, 1, 0.1)]
    assert unsure(picked, rows=3, threshold=0.95) == 2
    assert unsure(picked, rows=2, threshold=0.95) == 1


def test_passes_follow_the_blocks_that_were_seen() -> None:
    """Blocks of 1 + 2 u passes."""
    line = PassesForRounds()
    for n in range(400):
        line.learn(passes=1 + 2 * (n % 5), unsure_rows=n % 5)
    made = line.forwards(tokens=64, unsure_rows=3, block_size=32, is_end=False)
    assert made.commits == 2
    assert made.previews == pytest.approx(2 + 2 * 3, abs=0.6)


def test_the_last_block_is_paid_for_as_a_whole() -> None:
    line = PassesForRounds()
    middle = line.forwards(tokens=8, unsure_rows=0, block_size=32, is_end=False)
    end = line.forwards(tokens=8, unsure_rows=0, block_size=32, is_end=True)
    assert (middle.commits, end.commits) == (0.25, 1)
    assert end.previews == 4 * middle.previews


def test_blocks_that_are_alike_do_not_make_a_line_that_falls() -> None:
    line = PassesForRounds()
    for n in range(300):
        line.learn(passes=9 - n % 4, unsure_rows=n % 4)
    many = line.forwards(tokens=32, unsure_rows=9, block_size=32, is_end=False)
    few = line.forwards(tokens=32, unsure_rows=0, block_size=32, is_end=False)
    assert many.previews >= few.previews > 5
