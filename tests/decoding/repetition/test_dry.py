"""What continuing a repetition costs."""

from typing import Any

import numpy as np
import pytest

from clover_local.decoding.repetition.dry import LONGEST, dry_penalties

M = 99


def costs(tokens: list[int], place: int, **given: Any) -> dict[int, float]:
    values: dict[str, Any] = {"multiplier": 1.0, "base": 2.0, "allowed": 2, "breakers": ()}
    return dry_penalties(
        np.array(tokens, dtype=np.int64), place, mask_token_id=M, **{**values, **given}
    )


def test_the_longer_the_match_the_more_its_continuation_costs() -> None:
    assert costs([1, 2, 5, 1, 2], 5) == {5: 1.0}
    assert costs([1, 2, 3, 5, 1, 2, 3], 7) == {5: 2.0}
    assert costs([2, 5, 2], 3) == {}


def test_the_longest_match_of_a_token_counts() -> None:
    got = costs([7, 3, 5, 0, 7, 2, 3, 5, 0, 7, 2, 3], 12)
    assert got == {5: 16.0}  # 3 5 0 7 2 3 stands before the second 5


def test_both_sides_of_a_masked_row_are_matched() -> None:
    assert costs([1, 5, 2, 3, 9, 1, M, 2, 3], 6) == {5: 2.0}
    assert costs([8, 5, 2, 3, 9, M, M, 2, 3], 6) == {5: 1.0}  # right of it only


def test_breakers_and_masks_end_a_match() -> None:
    assert costs([1, 2, 3, 5, 1, 2, 3], 7, breakers=[1]) == {5: 1.0}
    assert costs([1, 2, 3, 5, 1, 2, 3], 7, breakers=[3]) == {}
    assert costs([1, 2, 5, M, 2], 5) == {}


def test_a_very_long_match_costs_no_more_than_a_number_holds() -> None:
    tokens = [*range(90), 5, *range(90)]
    got = costs(tokens, len(tokens), base=100.0)
    assert got[5] == pytest.approx(100.0 ** (LONGEST - 2))


def test_nothing_known_costs_nothing() -> None:
    assert costs([], 0) == {}
    assert costs([M, M, M], 1) == {}
