"""(n + 1)(1 - c_n) < f."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.factor import FACTOR, factor


@pytest.mark.parametrize(
    ("f", "accepted"),
    # n = 1, 2, 3, 4: 2 * 0.01, 3 * 0.1, 4 * 0.2, 5 * 0.5
    [(0.02, 1), (0.31, 2), (0.79, 2), (0.81, 3), (2.49, 3), (2.51, 4)],
)
def test_largest_n_within_the_bound(
    f: float, accepted: int, table: Callable[..., RowStatistics]
) -> None:
    rows = table(0.8, 0.99, 0.5, 0.9)
    order = [1, 3, 0, 2]
    got = factor(rows, factor=f).accept.tolist()
    assert [row for row in order if got[row]] == order[:accepted]


def test_a_later_n_may_hold_where_an_earlier_does_not(table: Callable[..., RowStatistics]) -> None:
    """0.6, 0.6, 0.6: 2 * 0.4 holds and so does every n with (n + 1) * 0.4 < 1.7."""
    assert factor(table(0.6, 0.6, 0.6), factor=1.7).accept.tolist() == [True] * 3
    assert factor(table(0.6, 0.6, 0.6), factor=1.5).reasons == (FACTOR, FACTOR, "")
