"""Rows that should wait, on hand-made tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.repetition.deferral import OTHER_TOKEN, deferred
from clover_local.decoding.rules.most_confident import MOST_CONFIDENT
from clover_local.decoding.rules.threshold import ABOVE, threshold
from clover_local.decoding.settings import Settings

M, STOP = 99, 98


OTHERS = (60, 61, 62, 63)
SHARES = (0.4, 0.3, 0.2, 0.1)


def table(
    tokens: Sequence[int],
    confidences: Sequence[float],
    others: Sequence[int] = OTHERS,
    shares: Sequence[float] = SHARES,
) -> RowStatistics:
    """Rows whose other likely tokens share what their own leaves."""
    own, sure = torch.tensor(tokens), torch.tensor(confidences)
    left = (1 - sure)[:, None] * torch.tensor(shares)
    unread = torch.full((len(own),), torch.nan)
    return RowStatistics(
        token=own,
        confidence=sure,
        raw_confidence=sure,
        entropy=unread,
        top_ids=torch.cat([own[:, None], torch.tensor(others).expand(len(own), -1)], 1),
        top_probabilities=torch.cat([sure[:, None], left], 1),
    )


def chosen(
    block: Sequence[int],
    rows: RowStatistics,
    *,
    response: Sequence[int] = (),
    above: float = 0.9,
    **given: Any,
) -> tuple[RowStatistics, Accept]:
    """Of the block's masked rows those that do not wait, and what they get."""
    values = {"mask_token_id": M, "vocab_size": 100, "stop_ids": (STOP,)}
    settings = Settings(**{**values, **given})
    size = settings.no_repeat_ngram
    return deferred(
        threshold(rows, threshold=above),
        rows,
        settings,
        places=[row for row, token in enumerate(block) if token == M],
        block=block,
        response=response,
        ngrams={tuple(response[i : i + size]) for i in range(len(response) - size + 1)},
    )


def kept(
    block: Sequence[int], tokens: Sequence[int], confidences: Sequence[float], **given: Any
) -> Accept:
    """Of rows that want `tokens`, those that do not wait; each gets what it wants."""
    rows = table(tokens, confidences)
    got, accepted = chosen(block, rows, **given)
    assert got is rows
    return accepted


def filled(rows: RowStatistics, size: int, **given: Any) -> tuple[list[int], list[str]]:
    """A block of a model that wants the same in every pass, and why each row was fixed."""
    block, reasons = [M] * size, [""] * size
    for _ in range(size):
        places = [row for row, token in enumerate(block) if token == M]
        if not places:
            break
        left = RowStatistics(
            *(getattr(rows, name)[places] for name in ("token", "confidence", "raw_confidence")),
            *(getattr(rows, name)[places] for name in ("entropy", "top_ids", "top_probabilities")),
        )
        got, accepted = chosen(block, left, **given)
        assert accepted.accept.any()
        for i, (place, reason) in enumerate(zip(places, accepted.reasons, strict=True)):
            if reason:
                block[place], reasons[place] = int(got.token[i]), reason
    assert M not in block
    return block, reasons


def test_of_two_equal_neighbours_only_the_surer_gets_through() -> None:
    got = kept([M, M, M], [5, 5, 6], [0.95, 0.97, 0.96], in_block_repetition=True)
    assert got.reasons == ("", ABOVE, ABOVE)


@pytest.mark.parametrize("block", [[5, M, 7, M], [7, M, 5, M]], ids=["left", "right"])
def test_a_fixed_neighbour_counts_on_both_sides(block: list[int]) -> None:
    got = kept(block, [5, 8], [0.99, 0.95], in_block_repetition=True)
    assert got.accept.tolist() == [False, True]


def test_the_end_of_the_thinking_comes_once_in_a_block() -> None:
    end: dict[str, Any] = {"think_end_token_id": 50, "think_end_bias": 100.0}
    got = kept([M] * 6, [50, 1, 50, 2, 50, 3], [1.0] * 6, **end)
    assert got.accept.tolist() == [True, True, False, True, False, True]
    got = kept([M, 7, 50, M, M], [1, 2, 50], [0.95] * 3, **end)
    assert got.accept.tolist() == [True, True, False]


def test_the_responses_last_token_is_the_first_rows_neighbour() -> None:
    got = kept([M, M], [5, 6], [0.99, 0.95], response=[1, 5], in_block_repetition=True)
    assert got.accept.tolist() == [False, True]


def test_where_all_accepted_rows_wait_another_row_goes() -> None:
    got = kept([5, M, M, M], [5, 6, 7], [0.99, 0.2, 0.3], in_block_repetition=True)
    assert got.reasons == ("", "", MOST_CONFIDENT)


def test_where_every_row_repeats_the_most_confident_gets_its_next_likely_token() -> None:
    rows = table([5, 5], [0.2, 0.95])
    got, accepted = chosen([5, M, 5, M], rows, in_block_repetition=True)
    assert accepted.reasons == ("", OTHER_TOKEN) and accepted.accept.tolist() == [False, True]
    assert got.token.tolist() == [5, OTHERS[0]]
    assert got.confidence.tolist() == pytest.approx([0.2, 0.05 * SHARES[0]])
    assert rows.token.tolist() == [5, 5]


@pytest.mark.parametrize("size", [2, 3, 32])
@pytest.mark.parametrize("tokens", [[5], [5, 6], [5, 5, 6], [5, 6, 6, 5]], ids=str)
@pytest.mark.parametrize("above", [0.0, 0.5, 0.99])
def test_no_neighbours_are_equal_however_long_the_model_wants_it(
    size: int, tokens: list[int], above: float
) -> None:
    """The table of a pass never changes; the answer so far ends with what the first row wants."""
    wanted = [tokens[row % len(tokens)] for row in range(size)]
    sure = [0.9 - (row * 7 % size) / 100 for row in range(size)]
    given = {"in_block_repetition": True, "response": [9, 5], "above": above}
    block, reasons = filled(table(wanted, sure), size, **given)
    assert all(a != b for a, b in pairwise([5, *block]))
    changed = [place for place in range(size) if block[place] != wanted[place]]
    assert changed == [place for place, reason in enumerate(reasons) if reason == OTHER_TOKEN]
    assert 0 < len(changed) < size
    repeated, _ = filled(table(wanted, sure), size, **{**given, "in_block_repetition": False})
    assert repeated == wanted


@pytest.mark.parametrize(
    ("others", "shares", "block", "expected"),
    [
        ((6, 60, 61, 62), SHARES, [5, M, 6], (60, 0.3)),  # 6 would repeat the right neighbour
        ((61, 60, 7, 8), (0.3, 0.3, 0.2, 0.1), [5, M, 6], (60, 0.3)),  # a tie: the lower id
        ((7, 8), (0.0, 0.0), [5, M, 6], (0, 0.0)),  # the model leaves nothing else a share
        ((7, 8), (0.0, 0.0), [5, M, 0], (1, 0.0)),
        ((STOP, 60), (0.4, 0.3), [5, M, 6], (STOP, 0.4)),  # an end is no repeat
    ],
)
def test_the_likeliest_token_that_stands_beside_another_is_taken(
    others: tuple[int, ...],
    shares: tuple[float, ...],
    block: list[int],
    expected: tuple[int, float],
) -> None:
    got, accepted = chosen(block, table([5], [0.5], others, shares), in_block_repetition=True)
    assert accepted.reasons == (OTHER_TOKEN,)
    assert (int(got.token), float(got.confidence)) == pytest.approx((expected[0], expected[1] / 2))


def test_what_is_banned_is_not_taken_and_where_nothing_is_left_the_row_keeps_its_token() -> None:
    rows = table([5], [1.0], (M, STOP), (0.0, 0.0))
    given: dict[str, Any] = {"in_block_repetition": True, "vocab_size": 9}
    got, _ = chosen([5, M, 6], rows, suppress=(0, 1, 2, 7), **given)
    assert got.token.tolist() == [3]
    got, accepted = chosen([5, M, 6], rows, suppress=(0, 1, 2, 3, 4, 7, 8), **given)
    assert (got.token.tolist(), accepted.reasons) == ([5], (ABOVE,))


def test_an_early_end_of_text_is_not_taken_where_it_has_to_wait() -> None:
    rows = table([5, 7], [0.95, 0.5], (STOP, 60), (0.6, 0.4))
    given: dict[str, Any] = {"in_block_repetition": True, "eos_order": True}
    got, accepted = chosen(
        [7, M, 5, M, 7], table([7, 5], [0.5, 0.95], (STOP, 60), (0.6, 0.4)), **given
    )
    assert (got.token.tolist(), accepted.reasons) == ([7, 60], ("", OTHER_TOKEN))
    got, accepted = chosen([5, M, 7, M], rows, **given)
    assert (got.token.tolist(), accepted.reasons) == ([STOP, 7], (OTHER_TOKEN, ""))


def test_an_ngram_is_repeated_only_where_all_candidates_would_complete_one() -> None:
    response = [1, 2, 5, 1, 2, 60, 1, 2, 61, 1, 2]
    given: dict[str, Any] = {"response": response, "no_repeat_ngram": 3}
    got, accepted = chosen([M], table([5], [0.95]), **given)
    assert (got.token.tolist(), accepted.reasons) == ([62], (OTHER_TOKEN,))
    rows = table([5], [0.95], (60, 61), (0.5, 0.5))
    got, accepted = chosen([M], rows, **given)
    assert got is rows and accepted.reasons == (ABOVE,)
    # A double is worse than that.
    got, accepted = chosen(
        [M], table([2], [0.95], (60, 61), (0.5, 0.5)), **given, in_block_repetition=True
    )
    assert (got.token.tolist(), accepted.reasons) == ([60], (OTHER_TOKEN,))


def test_under_the_loop_guard_ngrams_only_wait() -> None:
    response = [1, 2, 5, 1, 2]
    given: dict[str, Any] = {"response": response, "no_repeat_ngram": 3, "guarded": True}
    rows = table([5], [0.95])
    got, accepted = chosen([M], rows, **given)
    assert got is rows and accepted.reasons == (ABOVE,)
    got, _ = chosen([5, M], rows, in_block_repetition=True, **given)
    assert got.token.tolist() == [60]


def test_rows_are_visited_as_sure_as_they_are_without_a_control_of_ours() -> None:
    rows = replace(table([5, 5], [0.99, 0.97]), raw_confidence=torch.tensor([0.92, 0.98]))
    rows = replace(rows, entropy=torch.zeros(2))
    got = chosen([M, M], rows, in_block_repetition=True, min_new_tokens=3)[1]
    assert got.accept.tolist() == [False, True]
    assert chosen([M, M], rows, in_block_repetition=True)[1].accept.tolist() == [True, False]


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


def doubled(tokens: Sequence[int], place: int) -> bool:
    """Whether the token at `place` stands beside itself; stop tokens may."""
    beside = tokens[max(place - 1, 0) : place] + tokens[place + 1 : place + 2]  # type: ignore[operator]
    return tokens[place] != STOP and tokens[place] in beside


def completes(tokens: Sequence[int], place: int, size: int) -> bool:
    """Whether an n-gram over `place` stands elsewhere too."""
    grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    over = range(max(place - size + 1, 0), min(place, len(tokens) - size) + 1)
    return tokens[place] != STOP and any(
        M not in grams[at] and grams.count(grams[at]) > 1 for at in over
    )


@pytest.mark.parametrize("size", [0, 2, 3])
def test_random_blocks_are_decided_as_the_rule_says(size: int) -> None:
    """Few tokens, so that rows often want the same; what must hold is checked row by row."""
    reasons_seen = set[str]()
    for seed in range(400):
        chance = random.Random(seed)
        response = chance.choices((1, 2, 3, 4), k=chance.choice([0, 1, 9]))
        block = [chance.choice((M, M, 1, 2, 3, 4)) for _ in range(chance.choice([2, 5, 9]))]
        places = [row for row, token in enumerate(block) if token == M]
        if not places:
            continue
        wanted = chance.choices((1, 1, 2, 3, STOP), k=len(places))
        rows = table(wanted, [chance.choice((0.1, 0.5, 0.95, 0.99)) for _ in places])
        given: dict[str, Any] = {"response": response, "in_block_repetition": True}
        got, accepted = chosen(block, rows, **given, no_repeat_ngram=size)
        start, filled_in = len(response), [*response, *block]
        taken = [i for i, reason in enumerate(accepted.reasons) if reason]
        assert taken and accepted.accept.nonzero()[:, 0].tolist() == taken
        for i in taken:
            filled_in[start + places[i]] = int(got.token[i])
        assert not any(doubled(filled_in, start + places[i]) for i in taken)
        if size and OTHER_TOKEN not in accepted.reasons:
            assert not any(completes(filled_in, start + places[i], size) for i in taken)
        for i, place in enumerate(places):
            alone = [*response, *block]
            alone[start + place] = wanted[i]
            waits = doubled(alone, start + place) or (
                size > 0 and completes(alone, start + place, size)
            )
            if OTHER_TOKEN in accepted.reasons:
                assert waits and len(taken) == 1
            elif rows.confidence[i] > 0.9 and not accepted.reasons[i]:
                filled_in[start + place] = wanted[i]
                assert doubled(filled_in, start + place) or (
                    size > 0 and completes(filled_in, start + place, size)
                )
                filled_in[start + place] = M
        reasons_seen |= set(accepted.reasons)
    assert reasons_seen == {"", ABOVE, MOST_CONFIDENT, OTHER_TOKEN}
