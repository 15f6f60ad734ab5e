"""What continuing a repetition costs."""

import random
from collections.abc import Collection
from typing import Any

import pytest

from clover_local.decoding.repetition.dry import LONGEST, dry_penalties
from clover_local.decoding.repetition.history import History

M = 99


def costs(tokens: list[int], place: int, **given: Any) -> dict[int, float]:
    values: dict[str, Any] = {"multiplier": 1.0, "base": 2.0, "allowed": 2, "breakers": ()}
    known = History().known(tokens, start=0)
    return dry_penalties(known, place, mask_token_id=M, **{**values, **given})


def test_the_longer_the_match_the_more_its_continuation_costs() -> None:
    assert costs([1, 2, 5, 1, 2], 5) == {5: 1.0}
    assert costs([1, 2, 3, 5, 1, 2, 3], 7) == {5: 2.0}
    assert costs([2, 5, 2], 3) == {}


def test_the_longest_match_of_a_token_counts() -> None:
    got = costs([7, 3, 5, 0, 7, 2, 3, 5, 0, 7, 2, 3], 12)
    assert got == {5: 16.0}  # 3 5 0 7 2 3 stands before the second 5


def test_both_sides_of_a_masked_row_are_matched() -> None:
    assert costs([1, 5, 2, 3, 9, 1, M, 2, 3], 6) == {5: 2.0}
    assert costs([8, 5, 2, 3, 9, M, M, 2, 3], 6) == {5: 1.0}  # right of it only


def test_breakers_and_masks_end_a_match() -> None:
    assert costs([1, 2, 3, 5, 1, 2, 3], 7, breakers=[1]) == {5: 1.0}
    assert costs([1, 2, 3, 5, 1, 2, 3], 7, breakers=[3]) == {}
    assert costs([1, 2, 5, M, 2], 5) == {}


def test_a_very_long_match_costs_no_more_than_a_number_holds() -> None:
    tokens = [*range(90), 5, *range(90)]
    got = costs(tokens, len(tokens), base=100.0)
    assert got[5] == pytest.approx(100.0 ** (LONGEST - 2))


def matched(tokens: list[int], place: int, other: int, breakers: Collection[int]) -> int:
    """How many tokens beside `place` stand beside `other` too: the definition."""
    count = 0
    for side in (-1, 1):
        for distance in range(1, LONGEST + 1):
            near, its = place + side * distance, other + side * distance
            if not (0 <= near < len(tokens) and 0 <= its < len(tokens)):
                break
            if tokens[near] in {M, *breakers} or tokens[near] != tokens[its]:
                break
            count += 1
    return count


@pytest.mark.parametrize("letters", [2, 3, 8])
@pytest.mark.parametrize("allowed", [1, 2, 5])
def test_costs_are_those_of_the_definition_on_random_texts(letters: int, allowed: int) -> None:
    draw = random.Random(letters)
    for length in (1, 7, 40, 150):
        response = draw.choices(range(letters), k=length)
        block = [draw.choice([M, token]) for token in draw.choices(range(letters), k=12)]
        history = History()
        history.follow(response)
        for start in (length, length - 1):
            seen = [*response[start:], *block]
            tokens = [*response[:start], *seen]
            known = history.known(seen, start=start)
            for place in (*range(length, len(tokens)), len(tokens)):
                expected = dict[int, float]()
                for other, token in enumerate(tokens):
                    count = matched(tokens, place, other, [1])
                    if other != place and token != M and count >= allowed:
                        cost = 0.5 * 1.5 ** min(count - allowed, LONGEST)
                        expected[token] = max(cost, expected.get(token, 0.0))
                given = dict[str, Any](multiplier=0.5, base=1.5, allowed=allowed, breakers=[1])
                got = dry_penalties(known, place, mask_token_id=M, **given)
                assert got == expected


def test_nothing_known_costs_nothing() -> None:
    assert costs([], 0) == {}
    assert costs([M, M, M], 1) == {}
