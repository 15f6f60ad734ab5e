"""Token ids of a sequence that grows at its end; to keep an earlier point of it costs nothing.

The points of a sequence are lengths of one shared list. So a commit costs no more than its own
tokens, however long the sequence is, and checkpoints hold no copies of what they have in common.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class Prefix(Sequence[int]):
    """The first tokens of a list; what others append to that list never shows here."""

    __slots__ = ("_length", "_shared")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._shared = list(tokens)
        self._length = len(self._shared)

    def followed_by(self, tokens: Sequence[int]) -> "Prefix":
        """This, then `tokens`; copies only where the shared list goes on in another way."""
        if len(self._shared) > self._length:
            return Prefix([*self, *tokens])
        self._shared.extend(tokens)
        return self._of_shared(len(self._shared))

    def first(self, length: int) -> "Prefix":
        """The first `length` tokens, at most all."""
        return self._of_shared(min(length, self._length))

    def starts(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with these; tokens of the same list are not looked at."""
        if self._length > len(tokens):
            return False
        if isinstance(tokens, Prefix) and tokens._shared is self._shared:
            return True
        return [*self] == [*tokens[: self._length]]

    def _of_shared(self, length: int) -> "Prefix":
        made = Prefix.__new__(Prefix)
        made._shared, made._length = self._shared, length
        return made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._shared, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self._shared[i] for i in range(self._length)[index])
        return self._shared[range(self._length)[index]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._length and self.starts(other)

    def __repr__(self) -> str:
        return f"Prefix({[*self]})"
