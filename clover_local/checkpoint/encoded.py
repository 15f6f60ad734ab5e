"""A matrix that a file of another format holds: it lies where a tensor lies, and decodes itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from clover_local.checkpoint.packed import PackedFormat
    from clover_local.kernels.packed import Weight


@runtime_checkable
class Encoded(Protocol):
    """`nbytes` bytes from `start` on in the file `shard`; `dtype` is a name for the user."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shard(self) -> Path: ...

    @property
    def start(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def format(self) -> PackedFormat | None:
        """That of the weight; None where it is plain."""
        ...

    def decode(self, content: Tensor) -> Weight:
        """The weight, in the shape of its target, from its bytes (uint8)."""
        ...
