"""So many passes a block."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.fixed_steps import fixed_steps


@pytest.mark.parametrize(
    ("left", "accepted"),
    [(8, [4]), (3, [1, 4]), (2, [1, 3, 4]), (1, [0, 1, 2, 3, 4]), (-3, [0, 1, 2, 3, 4])],
)
def test_rows_are_spread_over_the_steps_that_are_left(
    left: int, accepted: list[int], table: Callable[..., RowStatistics]
) -> None:
    rows = table(0.1, 0.8, 0.2, 0.3, 0.9)
    assert fixed_steps(rows, steps_left=left).accept.nonzero()[:, 0].tolist() == accepted
