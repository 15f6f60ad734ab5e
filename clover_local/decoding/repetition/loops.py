"""Whether an answer loops, and how much of it was good.

Two signs: a run of tokens that recurs again and again within a window, whatever stands between; and
a block that is so uniform that it compresses to a fraction. Both look at ids only.
"""

import zlib
from collections.abc import Sequence

import numpy as np

NGRAM, TIMES, WINDOW = 12, 4, 384
"""So many tokens that recur so often, without overlap, among the last so many."""
RATIO, LEAST = 0.25, 24
"""A block of at least so many tokens loops if it compresses below that share of its bytes."""


def loops(response: Sequence[int], block: Sequence[int]) -> bool:
    """Whether `response`, then `block`, ends in a loop."""
    return _recurs([*response[-WINDOW:], *block][-WINDOW:]) or _is_uniform(block)


def good_length(response: Sequence[int], block: Sequence[int]) -> int:
    """How many tokens of a looping `block` are worth keeping: up to the end of the first round.

    A loop without an exact period is not worth a token.
    """
    tokens = [*response[-WINDOW:], *block]
    for period in range(1, len(tokens) // 2 + 1):
        first = len(tokens) - period  # the periodic tail begins here
        while first > 0 and tokens[first - 1] == tokens[first - 1 + period]:
            first -= 1
        if len(tokens) - first >= max(2 * period, NGRAM):
            return max(first + period - (len(tokens) - len(block)), 0)
    return 0


def _recurs(tokens: Sequence[int]) -> bool:
    """Whether the n-gram at the end is there `TIMES` times."""
    last, times, end = list(tokens[-NGRAM:]), 0, len(tokens)
    while end >= NGRAM:
        if list(tokens[end - NGRAM : end]) == last:
            times += 1
            end -= NGRAM
        else:
            end -= 1
    return times >= TIMES


def _is_uniform(block: Sequence[int]) -> bool:
    if len(block) < LEAST:
        return False
    raw = np.asarray(block, dtype=np.int32).tobytes()
    return len(zlib.compress(raw, 9)) < RATIO * len(raw)
