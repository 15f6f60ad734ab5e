"""Typed access to GGUF metadata; an absent or wrongly typed value is an error with the key."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clover_local.errors import CheckpointError
from clover_local.gguf.container import MetaValue

T = TypeVar("T")


class Values:
    """The metadata of one file. A default stands for an absent key only."""

    def __init__(self, metadata: Mapping[str, MetaValue], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def text(self, key: str, *default: str) -> str:
        value = self._metadata.get(key)
        return value if isinstance(value, str) else self._other(key, default, "a text")

    def integer(self, key: str, *default: int) -> int:
        """A whole number; of an array that repeats one number, this one (0 is left out)."""
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            distinct = {int(number) for number in value} - {0}
            value = distinct.pop() if len(distinct) == 1 else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return self._other(key, default, "an integer")

    def number(self, key: str, *default: float) -> float:
        value = self._metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self._other(key, default, "a number")

    def flag(self, key: str, *default: bool) -> bool:
        value = self._metadata.get(key)
        return value if isinstance(value, bool) else self._other(key, default, "true or false")

    def texts(self, key: str, *default: list[str]) -> list[str]:
        value = self._metadata.get(key)
        return value if isinstance(value, list) else self._other(key, default, "a list of texts")

    def integers(self, key: str, *default: Sequence[int]) -> Sequence[int]:
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return [int(number) for number in value]
        return self._other(key, default, "a list of integers")

    def flags(self, key: str, *default: Sequence[bool]) -> Sequence[bool]:
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind == "b":
            return [bool(flag) for flag in value]
        return self._other(key, default, "a list of flags")

    def floats(self, key: str) -> NDArray[np.float32]:
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            return value.astype(np.float32)
        return self._other(key, (), "a list of numbers")

    def _other(self, key: str, default: tuple[T, ...], wanted: str) -> T:
        if key in self._metadata:
            raise CheckpointError(
                f"{self._source}: {key} is not {wanted}: use a file made by llama.cpp's converter "
                "or by clover-local"
            )
        if default:
            return default[0]
        raise CheckpointError(
            f"{self._source} lacks the key {key}: use a file made by llama.cpp's converter or by "
            "clover-local"
        )
