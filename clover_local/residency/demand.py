"""What one layer of one forward asks of the expert cache, and what the cache answers.

Vectors instead of single experts, so that a decision costs a few numpy calls a layer. A key is
layer * num_experts + expert, with layers as a table counts its own.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["preview", "commit", "prompt"]
CommitKind: TypeAlias = Literal["commit", "prompt"]

NONE: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """The experts that one layer of one forward uses."""

    layer: int
    experts: IntArray
    """Distinct ids, ascending."""
    rows: IntArray
    """How many rows use each of them."""
    kind: Kind
    block: int
    """Another number for every block; a commit belongs to the block whose previews it follows."""
    number: int = 0
    """Of the forward within its block, from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """Experts to compute together: first make the copies, then run."""

    experts: IntArray
    slots: IntArray
    """Where each of them is."""
    copied: IntArray
    """Places in `experts` of those that have to be copied from the host into their slots first."""


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """How a demand is served: waves in order, and what it did to the cache."""

    waves: tuple[Wave, ...]
    hits: int
    misses: int
    evicted: IntArray
    """Keys of the experts that lost their slots."""
    refused: int
    """Misses that were computed from a passing slot and not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Resized:
    """What a change of size does to the slots; make the moves before the lost slots are reused."""

    lost: IntArray
    """Keys, layer * num_experts + expert, that are not resident any more."""
    moves: IntArray
    """[n, 2]: from a slot that is gone to one that is free."""
