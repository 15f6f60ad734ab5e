"""What an expert in a slot is worth: the one thing in which cache policies differ.

The table (`table.py`) calls a policy with vectors of keys, layer * num_experts + expert. Values are
compared among the experts of one table only; the least goes first, ties by key.

A `prior` [layers, E] is what a profile knows: the share of forwards that used each, 0 to 1.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from clover_local.residency.demand import Demand, FloatArray, IntArray
from clover_local.residency.lfru import Lfru
from clover_local.residency.names import POLICY_NAMES


class Policy(Protocol):
    """Keeps what it needs to know of every expert of a table."""

    def used(self, keys: IntArray, demand: Demand) -> None:
        """A preview or commit uses these experts."""

    def end_block(self) -> None:
        """A block is over; called before the first `used` of the next one."""

    def values(self, keys: IntArray) -> FloatArray:
        """The worth of experts that the current block has not used; it stands still in a block."""
        ...

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """The worth of experts that `demand` uses and misses; `used` was called before.

        Infinite: any expert that the block has not used may go for it.
        """
        ...


class Lru:
    """Least recently used."""

    def __init__(self, prior: FloatArray) -> None:
        self._last = prior.ravel() - 1  # before the first demand
        self._now = 0

    def used(self, keys: IntArray, demand: Demand) -> None:
        """See `Policy`."""
        self._now += 1
        self._last[keys] = self._now

    def end_block(self) -> None:
        """See `Policy`."""

    def values(self, keys: IntArray) -> FloatArray:
        """See `Policy`."""
        return self._last[keys]

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """See `Policy`."""
        return np.full(len(keys), np.inf)


class Lfu:
    """Least frequently used, in forwards since the start."""

    def __init__(self, prior: FloatArray) -> None:
        self._count = prior.ravel().copy()

    def used(self, keys: IntArray, demand: Demand) -> None:
        """See `Policy`."""
        self._count[keys] += 1

    def end_block(self) -> None:
        """See `Policy`."""

    def values(self, keys: IntArray) -> FloatArray:
        """See `Policy`."""
        return self._count[keys]

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """See `Policy`."""
        return np.full(len(keys), np.inf)


class BlockLru:
    """Least recently used, in blocks; of one block the expert that fewer forwards used."""

    def __init__(self, prior: FloatArray) -> None:
        self._value = prior.ravel().copy()
        self._uses = np.zeros(prior.size)
        self._block = 1

    def used(self, keys: IntArray, demand: Demand) -> None:
        """See `Policy`."""
        self._uses[keys] += 1

    def end_block(self) -> None:
        """See `Policy`."""
        used = self._uses > 0
        self._value[used] = self._block + self._uses[used] / (1 + self._uses[used])
        self._uses[:] = 0
        self._block += 1

    def values(self, keys: IntArray) -> FloatArray:
        """See `Policy`."""
        return self._value[keys]

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """See `Policy`."""
        return np.full(len(keys), np.inf)


class Static:
    """The most used experts of a profile; what is in use now changes nothing."""

    def __init__(self, prior: FloatArray) -> None:
        self._value = prior.ravel().copy()

    def used(self, keys: IntArray, demand: Demand) -> None:
        """See `Policy`."""

    def end_block(self) -> None:
        """See `Policy`."""

    def values(self, keys: IntArray) -> FloatArray:
        """See `Policy`."""
        return self._value[keys]

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """See `Policy`."""
        return self._value[keys]


_POLICIES: dict[str, Callable[[FloatArray], Policy]] = dict(
    zip(POLICY_NAMES, (Lfru, Lfu, Lru, BlockLru, Static), strict=True)
)


def make_policy(
    name: str, *, layers: int, num_experts: int, prior: FloatArray | None = None
) -> Policy:
    """The policy `name` for a table of that many layers.

    Raises:
        ValueError: an unknown name, a prior of another shape, or `static` without one.
    """
    if name not in _POLICIES:
        raise ValueError(f"policy {name} is unknown: use {', '.join(POLICY_NAMES)}")
    if prior is None and name == "static":
        raise ValueError("policy static keeps what a profile says: it needs one")
    known = np.zeros((layers, num_experts)) if prior is None else prior.astype(float)
    if known.shape != (layers, num_experts):
        raise ValueError(f"a prior of shape {known.shape}, the table is {(layers, num_experts)}")
    return _POLICIES[name](known)
