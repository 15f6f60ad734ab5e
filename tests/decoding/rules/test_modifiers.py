"""Bounds on rows a pass, a falling threshold, an early finish; doubt under controls of ours."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules import modifiers
from clover_local.decoding.rules.choose import choose
from clover_local.decoding.rules.threshold import ABOVE, threshold
from clover_local.decoding.settings import Settings

Table = Callable[..., RowStatistics]


def test_threshold_falls_with_the_passes_down_to_zero() -> None:
    falls = [modifiers.decayed(0.9, decay=0.25, pass_number=n) for n in range(5)]
    assert falls == pytest.approx([0.9, 0.65, 0.4, 0.15, 0.0])
    assert modifiers.decayed(0.9, decay=0, pass_number=31) == 0.9


def test_at_least_so_many_rows_the_most_confident_first(table: Table) -> None:
    rows = table(0.5, 0.96, 0.6, 0.6)
    accepted = modifiers.at_least(threshold(rows, threshold=0.95), rows, count=3)
    assert accepted.reasons == ("", ABOVE, "min_per_pass", "min_per_pass")
    assert modifiers.at_least(accepted, rows, count=9).accept.all()


def test_at_most_so_many_rows_the_most_confident_stay(table: Table) -> None:
    rows = table(0.96, 0.98, 0.2, 0.98)
    accepted = modifiers.at_most(threshold(rows, threshold=0.95), rows, count=2)
    assert accepted.accept.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("resolved", "needed"), [(0.0, 7.5), (0.33, 7.5), (0.34, 5.0), (0.66, 5.0), (0.67, 2.5)]
)
def test_block_is_finished_at_a_gap_that_falls_as_it_fills(
    resolved: float, needed: float, table: Table
) -> None:
    for gap, finishes in ((needed + 0.01, True), (needed - 0.01, False)):
        second = 1 / (1 + math.exp(gap))
        rows = table(*[1 - second] * 3, second=[second] * 3)
        accepted = modifiers.finish(threshold(rows, threshold=1.0), rows, resolved=resolved)
        assert bool(accepted.accept.all()) == finishes


def test_a_second_token_whose_probability_is_zero_is_no_nan(table: Table) -> None:
    rows = table(1.0, 0.3, second=[0.0, 0.2])
    accepted = modifiers.finish(threshold(rows, threshold=0.95), rows, resolved=0.0)
    assert accepted.accept.all()


def test_a_gap_that_is_no_number_is_refused(table: Table) -> None:
    rows = table(0.9, 0.3, second=[0.05, torch.nan])
    with pytest.raises(ValueError, match="masked row 1 has the gap NaN"):
        modifiers.finish(threshold(rows, threshold=0.95), rows, resolved=0.0)


def test_under_a_control_of_ours_a_row_is_as_sure_as_without_it(table: Table) -> None:
    rows = table(0.99, 0.99, second=[0.0, 0.0], raw=[0.3, 0.995], entropy=[0.06, 0.06])
    for own, accepted in ((0, [True, True]), (5, [False, True])):
        settings = Settings(mask_token_id=9, vocab_size=10, min_new_tokens=own)
        assert (
            choose(rows, settings, places=[0, 1], block_size=2, pass_number=0).accept.tolist()
            == accepted
        )
    doubted = modifiers.doubted(rows, settings)
    assert doubted.confidence.tolist() == pytest.approx([0.3, 0.99])
    assert doubted.entropy[0] > 0.6 and doubted.entropy[1] == rows.entropy[1]


def test_nothing_given_changes_no_bit(table: Table) -> None:
    rows = table(0.5, 0.96, 0.2)
    settings = Settings(mask_token_id=9, vocab_size=10)
    got = choose(rows, settings, places=[0, 1, 2], block_size=3, pass_number=7)
    expected = threshold(rows, threshold=0.95)
    assert torch.equal(got.accept, expected.accept) and got.reasons == expected.reasons
