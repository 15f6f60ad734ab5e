"""The best of every run of masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.hierarchy import HIERARCHY, hierarchy
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT


def test_best_of_each_run_above_low_and_all_above_the_threshold(
    table: Callable[..., RowStatistics],
) -> None:
    """Runs 2-4, 7-8 and 20: in the second none is above low."""
    rows = table(0.5, 0.96, 0.97, 0.3, 0.2, 0.45)
    got = hierarchy(rows, places=[2, 3, 4, 7, 8, 20], low=0.4, threshold=0.95)
    assert got.reasons == ("", HIERARCHY, HIERARCHY, "", "", HIERARCHY)


def test_equal_rows_of_a_run_give_the_lower(table: Callable[..., RowStatistics]) -> None:
    rows = table(0.5, 0.7, 0.7, 0.6)
    got = hierarchy(rows, places=[0, 1, 2, 3], low=0.4, threshold=0.95)
    assert got.accept.tolist() == [False, True, False, False]


def test_without_a_row_above_low_the_most_confident(table: Callable[..., RowStatistics]) -> None:
    got = hierarchy(table(0.1, 0.4, 0.2), places=[0, 5, 9], low=0.4, threshold=0.95)
    assert got.reasons == ("", MOST_CONFIDENT, "")


def test_a_place_for_each_row(table: Callable[..., RowStatistics]) -> None:
    with pytest.raises(ValueError, match="2 places for 1 rows"):
        hierarchy(table(0.1), places=[0, 1], low=0.4, threshold=0.9)
