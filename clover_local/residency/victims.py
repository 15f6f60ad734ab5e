"""The order in which a block's newcomers may displace residents: least value first, floors kept."""

import heapq

import numpy as np

from clover_local.residency.demand import FloatArray, IntArray


class Victims:
    """Residents that a block has not used, sorted once; who was used since is passed over.

    Each layer has a stack of its residents and shows its least one. A layer at its floor is set
    aside: it gives to nobody but itself until it holds more.
    """

    def __init__(
        self, keys: IntArray, values: FloatArray, *, layers: int, num_experts: int
    ) -> None:
        """`keys` ascending, with their values; equal values go in order of keys."""
        order = np.argsort(-values[::-1], kind="stable")  # least value, then least key, comes last
        keys, values = keys[::-1][order], values[::-1][order]
        owners = keys // num_experts
        self._stacks: list[list[tuple[float, int]]] = []
        for layer in range(layers):
            mine = owners == layer
            pairs = zip(values[mine].tolist(), keys[mine].tolist(), strict=True)
            self._stacks.append(list(pairs))
        self._heap = [(*stack[-1], layer) for layer, stack in enumerate(self._stacks) if stack]
        heapq.heapify(self._heap)
        self._aside = [False] * layers

    def take(
        self, layer: int, *, below: float, may_go: np.ndarray, held: list[int], floor: int
    ) -> int | None:
        """The key to evict for a newcomer of `layer` that is worth `below`; None = there is none.

        Args:
            may_go: [keys] bool: not used in this block, and still resident.
            held: experts that each layer holds.
        """
        own = self._head(layer, may_go) if self._aside[layer] else None
        while self._heap:
            _, key, owner = self._heap[0]
            if not may_go[key]:
                self._advance(owner, may_go)
            elif held[owner] <= floor and owner != layer:
                heapq.heappop(self._heap)
                self._aside[owner] = True
            else:
                break
        if own is not None and (not self._heap or own < self._heap[0][:2]):
            if own[0] >= below:
                return None
            self._stacks[layer].pop()
            return own[1]
        if not self._heap or self._heap[0][0] >= below:
            return None
        _, key, owner = self._heap[0]
        self._stacks[owner].pop()
        self._advance(owner, may_go)
        return key

    def grown(self, layer: int) -> None:
        """`layer` holds more than its floor: it takes part again."""
        if self._aside[layer]:
            self._aside[layer] = False
            if self._stacks[layer]:
                heapq.heappush(self._heap, (*self._stacks[layer][-1], layer))

    def _head(self, layer: int, may_go: np.ndarray) -> tuple[float, int] | None:
        """The least of a layer that may go, with the others popped."""
        stack = self._stacks[layer]
        while stack and not may_go[stack[-1][1]]:
            stack.pop()
        return stack[-1] if stack else None

    def _advance(self, layer: int, may_go: np.ndarray) -> None:
        """Puts the layer's next head in the place of the heap's first entry, which is its own."""
        head = self._head(layer, may_go)
        if head is None:
            heapq.heappop(self._heap)
        else:
            heapq.heapreplace(self._heap, (*head, layer))
