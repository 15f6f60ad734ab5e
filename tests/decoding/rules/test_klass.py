"""Sure rows that have come to rest."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.klass import KLASS, Stillness, divergence, klass


def test_rows_have_to_be_sure_and_still(table: Callable[..., RowStatistics]) -> None:
    rows = table(0.95, 0.95, 0.85, 0.92, still=[2, 1, 5, 3])
    assert klass(rows, threshold=0.9, history=2).reasons == (KLASS, "", "", KLASS)


def test_rows_without_their_stillness_are_refused(table: Callable[..., RowStatistics]) -> None:
    with pytest.raises(ValueError, match="still_passes"):
        klass(table(0.5), threshold=0.9, history=2)


def test_still_passes_are_counted_row_by_row_and_begin_anew_behind_a_move() -> None:
    one, two = [0.5, 0.5], [0.9, 0.1]
    stillness = Stillness(kl=0.01)
    seen = [
        stillness.follow(torch.tensor(rows), places).tolist()
        for rows, places in [
            ([one, one, one], [3, 4, 9]),
            ([one, two, one], [3, 4, 9]),
            ([one, two], [3, 4]),  # row 9 is fixed
            ([two, two], [3, 4]),
        ]
    ]
    assert seen == [[0, 0, 0], [1, 0, 1], [2, 1], [0, 2]]


def test_divergence_of_a_worked_case_and_of_banned_tokens() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert divergence(p, q).tolist() == pytest.approx([expected])
    assert divergence(p, p).tolist() == [0.0]


def test_a_distribution_never_moves_by_less_than_nothing() -> None:
    """Rounding alone would make some of these sums negative; a bound of 0 is never met."""
    p = torch.randn(50, 300, generator=torch.manual_seed(0)).softmax(-1)
    q = (p.log() + 1e-7 * torch.randn(50, 300)).softmax(-1)
    terms = (p * (p.log() - q.log())).sum(-1)
    assert (terms < 0).any() and (divergence(p, q) >= 0).all()
    stillness = Stillness(kl=0.0)
    stillness.follow(p, [*range(50)])
    assert stillness.follow(q, [*range(50)]).tolist() == [0] * 50
