"""The response as DRY searches it: an array, and the places where each token stands.

Both grow with the tokens that come, so that a forward pays for its own rows and for the places that
may match, not for the length of the response.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class History:
    """A response that grows, and behind it, for one forward at a time, what else is known."""

    def __init__(self) -> None:
        self._tokens: Tokens = np.zeros(64, dtype=np.int64)
        self._length = 0  # of the response; behind it lies what the last forward knew
        self._places = defaultdict[int, "array[int]"](lambda: array("q"))

    def follow(self, response: Sequence[int]) -> None:
        """Takes in the tokens by which `response` has grown."""
        for place in range(self._length, len(response)):
            self._places[response[place]].append(place)
        self._write(response[self._length :], self._length)
        self._length = len(response)

    def known(self, tokens: Sequence[int], *, start: int) -> "Known":
        """The response up to `start`, then `tokens`; valid until the next call.

        Where the response is longer, it goes on as `tokens` begin.
        """
        self._write(tokens, start)
        return Known(self, self._tokens[: start + len(tokens)], start)

    def places(self, token: int) -> Tokens:
        """Where the response has it, ascending."""
        return np.array(self._places.get(token, ()), dtype=np.int64)

    def _write(self, tokens: Sequence[int], start: int) -> None:
        end = start + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(end, dtype=np.int64)])
        self._tokens[start:end] = tokens


@dataclass(frozen=True, eq=False)
class Known:
    """All tokens that count for a row: a response up to `start`, and what stands behind it."""

    history: History
    tokens: Tokens
    start: int

    def first(self, length: int) -> "Known":
        """Without the tokens from `length` on, which is at least `start`."""
        return Known(self.history, self.tokens[:length], self.start)

    def places(self, token: int) -> Tokens:
        """Where they have it, ascending."""
        before = self.history.places(token)
        behind = np.flatnonzero(self.tokens[self.start :] == token) + self.start
        return np.concatenate([before[: before.searchsorted(self.start)], behind])
