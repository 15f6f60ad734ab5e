"""Rows that should wait, on hand-made tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.repetition.deferral import deferred
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.rules.threshold import ABOVE, threshold
from clover_local.decoding.settings import Settings

M, STOP = 99, 98


def table(tokens: Sequence[int], confidences: Sequence[float]) -> RowStatistics:
    rows = len(tokens)
    unread = torch.full((rows,), torch.nan)
    return RowStatistics(
        token=torch.tensor(tokens),
        confidence=torch.tensor(confidences),
        raw_confidence=unread,
        entropy=unread,
        top_ids=torch.zeros(rows, 5, dtype=torch.int64),
        top_probabilities=torch.full((rows, 5), torch.nan),
    )


def kept(
    block: Sequence[int],
    tokens: Sequence[int],
    confidences: Sequence[float],
    *,
    response: Sequence[int] = (),
    **given: Any,
) -> Accept:
    """Of the block's masked rows, which want `tokens`, those that do not wait."""
    settings = Settings(mask_token_id=M, vocab_size=100, stop_ids=(STOP,), **given)
    rows, size = table(tokens, confidences), settings.no_repeat_ngram
    return deferred(
        threshold(rows, threshold=0.9),
        rows,
        settings,
        places=[row for row, token in enumerate(block) if token == M],
        block=block,
        response=response,
        ngrams={tuple(response[i : i + size]) for i in range(len(response) - size + 1)},
    )


def test_of_two_equal_neighbours_only_the_surer_gets_through() -> None:
    got = kept([M, M, M], [5, 5, 6], [0.95, 0.97, 0.96], in_block_repetition=True)
    assert got.reasons == ("", ABOVE, ABOVE)


@pytest.mark.parametrize("block", [[5, M, 7, M], [7, M, 5, M]], ids=["left", "right"])
def test_a_fixed_neighbour_counts_on_both_sides(block: list[int]) -> None:
    got = kept(block, [5, 8], [0.99, 0.95], in_block_repetition=True)
    assert got.accept.tolist() == [False, True]


def test_the_responses_last_token_is_the_first_rows_neighbour() -> None:
    got = kept([M, M], [5, 6], [0.99, 0.95], response=[1, 5], in_block_repetition=True)
    assert got.accept.tolist() == [False, True]


def test_where_all_accepted_rows_wait_another_row_goes() -> None:
    got = kept([5, M, M, M], [5, 6, 7], [0.99, 0.2, 0.3], in_block_repetition=True)
    assert got.reasons == ("", "", MOST_CONFIDENT)


def test_where_every_row_repeats_the_most_confident_goes_so_a_pass_advances() -> None:
    got = kept([5, M, 5, M], [5, 5], [0.2, 0.95], in_block_repetition=True)
    assert got.reasons == ("", ABOVE)


@pytest.mark.parametrize(
    ("block", "response", "waits"),
    [
        ([2, 3, M, 9, M], [2, 3, 4, 1], True),  # looking left
        ([M, 3, 9, M], [1, 4, 3, 9, 7], True),  # right
        ([2, M, 3, M], [2, 4, 3], True),  # in the middle
        ([2, M, 3, 2, 4, 3, 9, M], [], True),  # seen in the block itself
        ([2, M, 9, M], [2, 4, 3], False),
    ],
)
def test_an_ngram_that_was_seen_waits(block: list[int], response: list[int], waits: bool) -> None:
    """Row one of the masked wants 4, the last wants 50."""
    got = kept(block, [4, 50], [0.99, 0.95], response=response, no_repeat_ngram=3)
    assert got.accept.tolist() == [not waits, True]


def test_ngrams_across_the_start_of_the_block_count() -> None:
    response = [7, 8, 9, 1, 7, 8]
    got = kept([M, M], [9, 50], [0.99, 0.95], response=response, no_repeat_ngram=3)
    assert got.accept.tolist() == [False, True]


def test_stop_tokens_may_stand_side_by_side() -> None:
    """A resolved block often ends with many."""
    got = kept(
        [4, M, M, M],
        [STOP, STOP, STOP],
        [0.99, 0.98, 0.97],
        in_block_repetition=True,
        no_repeat_ngram=2,
    )
    assert got.accept.all()


def test_a_stop_token_waits_for_all_that_stands_before_it() -> None:
    got = kept([M, 3, M, M], [4, STOP, 6], [0.5, 0.99, 0.95], eos_order=True)
    assert got.accept.tolist() == [False, False, True]
    got = kept([M, 3, M, M], [4, STOP, 6], [0.91, 0.99, 0.95], eos_order=True)
    assert got.accept.tolist() == [True, True, True]


def test_where_only_stop_tokens_were_accepted_a_row_before_them_goes() -> None:
    got = kept([M, M, M], [4, STOP, STOP], [0.1, 0.99, 0.98], eos_order=True)
    assert got.reasons == (MOST_CONFIDENT, "", "")
    got = kept([M, M], [STOP, STOP], [0.2, 0.99], eos_order=True)
    assert got.accept.tolist() == [True, False]
