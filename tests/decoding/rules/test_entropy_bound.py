"""Entropies are added from the smallest, the largest of them not counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.entropy_bound import entropy_bound


@pytest.mark.parametrize(
    ("gamma", "rows"),
    [(0.0, [1]), (0.04, [1]), (0.06, [1, 3]), (0.16, [0, 1, 3]), (0.5, [0, 1, 2, 3])],
)
def test_sum_without_the_largest_stays_within_gamma(
    gamma: float, rows: list[int], table: Callable[..., RowStatistics]
) -> None:
    made = table(0.5, 0.9, 0.2, 0.8, entropy=[0.3, 0.05, 2.0, 0.1])
    accept = entropy_bound(made, gamma=gamma).accept
    assert accept.nonzero()[:, 0].tolist() == rows


def test_among_equal_entropies_the_more_confident_goes_first(
    table: Callable[..., RowStatistics],
) -> None:
    made = table(0.3, 0.6, 0.6, entropy=[0.5, 0.5, 0.5])
    assert entropy_bound(made, gamma=0.1).accept.tolist() == [False, True, False]


def test_an_entropy_that_is_nan_is_refused(table: Callable[..., RowStatistics]) -> None:
    with pytest.raises(ValueError, match="masked row 0 has the entropy NaN"):
        entropy_bound(table(0.5, entropy=[torch.nan]), gamma=1)


@pytest.mark.parametrize("gamma", [0.1, 0.3, 0.7])
def test_a_sum_equal_to_gamma_is_within_it_whatever_its_digits(
    gamma: float, table: Callable[..., RowStatistics]
) -> None:
    made = table(0.9, 0.5, 0.4, entropy=[gamma, 2.0, 3.0])
    assert entropy_bound(made, gamma=gamma).accept.tolist() == [True, True, False]
