"""What all rules have in common, by the table of `choose`: whatever the rule, a pass advances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from clover_local.decoding.keys import SAMPLERS
from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.choose import choose
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.settings import Settings

Table = Callable[..., RowStatistics]
RULES = pytest.mark.parametrize("sampler", SAMPLERS)


def chosen(
    rows: RowStatistics, sampler: str, *, places: Sequence[int] | None = None, **given: Any
) -> Accept:
    settings = Settings(mask_token_id=9, vocab_size=10, sampler=sampler, **given)
    places = range(len(rows.confidence)) if places is None else places
    return choose(rows, settings, places=places, block_size=32, pass_number=0)


def full(table: Table, *confidences: float) -> RowStatistics:
    """Rows whose other numbers fit their confidence."""
    c = torch.tensor(confidences)
    entropy = (torch.special.entr(c) + torch.special.entr(1 - c)).tolist()
    return table(
        *confidences,
        entropy=entropy,
        second=((1 - c) * 0.9).tolist(),
        raw=confidences,
        still=[9] * len(confidences),
    )


@RULES
def test_one_row_left_is_accepted_however_unsure(sampler: str, table: Table) -> None:
    assert chosen(full(table, 0.01), sampler).accept.tolist() == [True]


@RULES
def test_rows_that_are_all_sure_go_at_once(sampler: str, table: Table) -> None:
    accepted = chosen(full(table, *[0.9999] * 4), sampler, sampler_k=4, sampler_steps=1)
    assert accepted.accept.tolist() == [True] * 4


UNSURE = [name for name in SAMPLERS if name not in ("fixed_steps", "sequential", "entropy_bound")]


@pytest.mark.parametrize("sampler", UNSURE)
def test_without_a_sure_row_the_most_confident_goes(sampler: str, table: Table) -> None:
    accepted = chosen(full(table, 0.1, 0.3, 0.2, 0.3), sampler)
    assert accepted.accept.tolist() == [False, True, False, False]
    assert accepted.reasons == ("", MOST_CONFIDENT, "", "")


@RULES
def test_a_tie_is_the_lowest_row(sampler: str, table: Table) -> None:
    accepted = chosen(full(table, *[0.3] * 5), sampler, sampler_steps=99, threshold=0.5)
    assert accepted.accept.tolist() == [True, False, False, False, False]


@RULES
def test_nan_is_refused(sampler: str, table: Table) -> None:
    rows = full(table, 0.5, torch.nan, 0.9)
    with pytest.raises(ValueError, match=r"masked row 1 has the .* NaN"):
        chosen(rows, sampler)


@RULES
def test_no_row_at_all_is_refused(sampler: str, table: Table) -> None:
    with pytest.raises(ValueError, match="at least one masked row, not 0"):
        chosen(full(table), sampler)


@RULES
def test_reasons_say_which_rows_were_accepted(sampler: str, table: Table) -> None:
    accepted = chosen(full(table, 0.99, 0.2, 0.97, 0.5), sampler)
    assert [bool(reason) for reason in accepted.reasons] == accepted.accept.tolist()


def test_an_unknown_rule_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="'luck' is none of the rules"):
        chosen(full(table, 0.5), "luck")
