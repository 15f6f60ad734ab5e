"""The threshold rule on hand-made tables."""

import pytest
import torch

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.rules.threshold import ABOVE, threshold


def table(*confidences: float) -> RowStatistics:
    """Statistics of rows that differ in confidence only; the rule may read nothing else."""
    rows = len(confidences)
    unread = torch.full((rows,), torch.nan)
    return RowStatistics(
        token=torch.arange(rows),
        confidence=torch.tensor(confidences),
        raw_confidence=unread,
        entropy=unread,
        top_ids=torch.zeros(rows, 5, dtype=torch.int64),
        top_probabilities=torch.full((rows, 5), torch.nan),
    )


def test_all_rows_above_the_threshold_are_accepted() -> None:
    accepted = threshold(table(0.5, 0.96, 0.2, 0.99), threshold=0.95)
    assert accepted.accept.tolist() == [False, True, False, True]
    assert accepted.reasons == ("", ABOVE, "", ABOVE)


@pytest.mark.parametrize("value", [0.95, 0.9, 0.7, 0.1, 1.0])
def test_a_confidence_equal_to_the_threshold_is_not_above_it(value: float) -> None:
    accepted = threshold(table(value, value / 2, value), threshold=value)
    assert accepted.accept.tolist() == [True, False, False]
    assert accepted.reasons == (MOST_CONFIDENT, "", "")


def test_without_a_row_above_only_the_most_confident_is_accepted() -> None:
    accepted = threshold(table(0.3, 0.1, 0.6, 0.5), threshold=0.95)
    assert accepted.accept.tolist() == [False, False, True, False]
    assert accepted.reasons == ("", "", MOST_CONFIDENT, "")


def test_lowest_row_wins_a_tie() -> None:
    accepted = threshold(table(0.1, 0.4, 0.2, 0.4, 0.4), threshold=0.4)
    assert accepted.accept.tolist() == [False, True, False, False, False]


def test_threshold_zero_accepts_every_row() -> None:
    assert threshold(table(0.01, 0.3, 1e-30), threshold=0.0).accept.all()


def test_single_row_is_always_accepted() -> None:
    assert threshold(table(0.0), threshold=1.0).accept.tolist() == [True]
