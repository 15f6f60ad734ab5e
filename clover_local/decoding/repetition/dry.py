"""DRY ("don't repeat yourself"): a token costs the more, the longer the repetition it continues.

Pew, "DRY: a modern repetition penalty" (text-generation-webui, 2024): a token whose left context of
n tokens stands before the same token elsewhere costs multiplier * base ^ (n - allowed) from
n = allowed on. Here with both sides, because a masked row may have neighbours to its right too: n
is what matches to the left of a place and to its right together.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

LONGEST = 64
"""Matched tokens a side that are counted."""

Tokens = NDArray[np.int64]


def dry_penalties(
    tokens: Tokens,
    place: int,
    *,
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Collection[int],
    mask_token_id: int,
) -> dict[int, float]:
    """What tokens at `place` cost, by id; the rest costs nothing.

    Args:
        tokens: the response and the active block, masks among them.
        place: of a masked row, or just behind the last token.
        multiplier: cost of a match of `allowed` tokens.
        base: what each further one multiplies it by.
        allowed: matched tokens that begin to cost, at least 1.
        breakers: ids at which a match ends.
        mask_token_id: ends it too.
    """
    ends = np.isin(tokens, [mask_token_id, *breakers])
    others = np.flatnonzero(tokens != mask_token_id)
    others = others[others != place]
    matched = np.zeros(len(tokens), dtype=np.int64)
    for side in (-1, 1):
        _extend(matched, tokens, ends, place, others, side=side)
    found = others[matched[others] >= allowed]
    costs = dict[int, float]()
    for token, length in zip(tokens[found].tolist(), matched[found].tolist(), strict=True):
        cost = multiplier * base ** min(length - allowed, LONGEST)
        costs[token] = max(cost, costs.get(token, 0.0))
    return costs


def _extend(
    matched: Tokens,
    tokens: Tokens,
    ends: NDArray[np.bool_],
    place: int,
    others: Tokens,
    *,
    side: int,
) -> None:
    """Adds to `matched`, at each of `others`, the tokens that equal those beside `place`."""
    alive = others
    for distance in range(1, LONGEST + 1):
        near = place + side * distance
        if not 0 <= near < len(tokens) or ends[near]:
            return
        beside = alive + side * distance
        inside = (beside >= 0) & (beside < len(tokens))
        alive, beside = alive[inside], beside[inside]
        alive = alive[tokens[beside] == tokens[near]]
        if not len(alive):
            return
        matched[alive] += 1
