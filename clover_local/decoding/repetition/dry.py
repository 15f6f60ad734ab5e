"""DRY ("don't repeat yourself"): a token costs the more, the longer the repetition it continues.

Pew, "DRY: a modern repetition penalty" (text-generation-webui, 2024): a token whose left context of
n tokens stands before the same token elsewhere costs multiplier * base ^ (n - allowed) from
n = allowed on. Here with both sides, because a masked row may have neighbours to its right too: n
is what matches to the left of a place and to its right together.
"""

from collections.abc import Collection

import numpy as np

from clover_local.decoding.repetition.history import Known, Tokens

LONGEST = 64
"""Matched tokens a side that are counted."""


def dry_penalties(
    known: Known,
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
        known: the response and the active block, masks among them.
        place: of a masked row, or just behind the last token.
        multiplier: cost of a match of `allowed` tokens.
        base: what each further one multiplies it by.
        allowed: matched tokens that begin to cost, at least 1.
        breakers: ids at which a match ends.
        mask_token_id: ends it too.
    """
    tokens, ends = known.tokens, {mask_token_id, *breakers}
    beside = {
        side: int(tokens[place + side]) for side in (-1, 1) if 0 <= place + side < len(tokens)
    }
    near = [known.places(token) - side for side, token in beside.items() if token not in ends]
    if not near:
        return {}
    others = np.unique(np.concatenate(near))
    others = others[(others >= 0) & (others < len(tokens)) & (others != place)]
    others = others[tokens[others] != mask_token_id]
    matched = np.zeros(len(others), dtype=np.int64)
    for side in (-1, 1):
        _extend(matched, tokens, ends, place, others, side=side)
    found = matched >= allowed
    ids, which = np.unique(tokens[others[found]], return_inverse=True)
    longest = np.zeros(len(ids), dtype=np.int64)
    np.maximum.at(longest, which, matched[found])
    return {
        token: multiplier * base ** min(length - allowed, LONGEST)
        for token, length in zip(ids.tolist(), longest.tolist(), strict=True)
    }


def _extend(
    matched: Tokens,
    tokens: Tokens,
    ends: Collection[int],
    place: int,
    others: Tokens,
    *,
    side: int,
) -> None:
    """Adds to `matched`, for each of `others`, the tokens that equal those beside `place`."""
    alive = np.arange(len(others))
    for distance in range(1, LONGEST + 1):
        near = place + side * distance
        if not 0 <= near < len(tokens) or int(tokens[near]) in ends:
            return
        beside = others[alive] + side * distance
        inside = (beside >= 0) & (beside < len(tokens))
        alive, beside = alive[inside], beside[inside]
        alive = alive[tokens[beside] == tokens[near]]
        if not len(alive):
            return
        matched[alive] += 1
