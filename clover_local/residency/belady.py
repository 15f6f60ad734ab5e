"""Belady's rule: knowing the whole trace, evict the expert whose next use is furthest away.

The newcomer is among the candidates: the one that is needed last is computed from a passing slot
and not kept, as `SlotTable` refuses experts. Misses are counted as there, each expert once a layer
and forward. Two figures are of use:

- `belady(trace, kept=slots)` is the optimum: no policy has fewer misses with that many slots.
- `belady(trace, kept=..., floor=..., protect=True)` is the same rule within the bounds of a
  `SlotTable`: its kept slots, its floors, nothing evicted that the current block has used, prompts
  in free slots only. Under such bounds the rule is no longer proved best, only far-sighted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clover_local.residency.demand import Demand, FloatArray, IntArray
from clover_local.residency.trace import RoutingTrace

NEVER = np.inf
GONE = -1.0


@dataclass(frozen=True)
class Optimum:
    """Misses of Belady's rule."""

    decode: int
    """Of previews and commits."""
    prompt: int


def belady(trace: RoutingTrace, *, kept: int, floor: int = 0, protect: bool = False) -> Optimum:
    """Misses with `kept` slots from an empty cache; next uses are those of previews and commits."""
    demands = list(trace.demands())
    cache = _Cache(trace.layers, trace.experts, kept=kept, floor=floor)
    misses = {True: 0, False: 0}
    block = None
    for demand, upcoming in zip(demands, _next_uses(demands, trace), strict=True):
        keys = demand.experts + demand.layer * trace.experts
        is_prompt = demand.kind == "prompt"
        if protect and not is_prompt:
            if demand.block != block:
                block = demand.block
                cache.may_go[:] = True
            cache.may_go[keys] = False
        misses[is_prompt] += cache.serve(
            demand.layer, keys, upcoming, evict=not (protect and is_prompt)
        )
    return Optimum(misses[False], misses[True])


class _Cache:
    """Who is resident, and when each is needed next."""

    def __init__(self, layers: int, experts: int, *, kept: int, floor: int) -> None:
        self.experts, self.kept, self.floor = experts, kept, floor
        self.next_use = np.full(layers * experts, GONE)
        self.may_go = np.ones(layers * experts, bool)
        self.held = np.zeros(layers, np.int64)

    def serve(self, layer: int, keys: IntArray, upcoming: FloatArray, *, evict: bool) -> int:
        """The misses of one demand, whose keys are needed next at `upcoming`."""
        resident = self.next_use[keys] != GONE
        self.next_use[keys[resident]] = upcoming[resident]
        new = np.flatnonzero(~resident)
        if not len(new):
            return 0
        order = new[np.argsort(upcoming[new], kind="stable")]
        order = order[upcoming[order] < NEVER]
        room = self.kept - int(self.held.sum())
        self._keep(layer, keys[order[:room]], upcoming[order[:room]])
        rest = order[room:]
        if evict and len(rest):
            self._exchange(layer, keys[rest], upcoming[rest])
        return len(new)

    def _keep(self, layer: int, keys: IntArray, upcoming: FloatArray) -> None:
        self.next_use[keys] = upcoming
        self.held[layer] += len(keys)

    def _exchange(self, layer: int, keys: IntArray, upcoming: FloatArray) -> None:
        """Newcomers, nearest use first, each for the resident whose next use is furthest."""
        gives = self.held > self.floor
        gives[layer] = True
        candidates = np.where(np.repeat(gives, self.experts) & self.may_go, self.next_use, GONE)
        # Layers may reach their floor on the way: a few more than are needed.
        count = min(len(candidates), len(keys) + (self.experts if self.floor else 0))
        furthest = np.argpartition(candidates, -count)[-count:]
        furthest = furthest[candidates[furthest] != GONE]
        furthest = furthest[np.argsort(-candidates[furthest], kind="stable")]
        pairs = zip(keys, upcoming, strict=True)
        newcomer = next(pairs, None)
        for victim in furthest:
            owner = victim // self.experts
            if owner != layer and self.held[owner] <= self.floor:
                continue
            if newcomer is None or self.next_use[victim] <= newcomer[1]:
                return
            self.next_use[victim] = GONE
            self.held[owner] -= 1
            self.next_use[newcomer[0]] = newcomer[1]
            self.held[layer] += 1
            newcomer = next(pairs, None)


def _next_uses(demands: Sequence[Demand], trace: RoutingTrace) -> list[NDArray[np.float64]]:
    """For each demand the number of the next preview or commit demand of each of its experts."""
    coming = np.full(trace.layers * trace.experts, NEVER)
    found = []
    for number in range(len(demands) - 1, -1, -1):
        demand = demands[number]
        keys = demand.experts + demand.layer * trace.experts
        found.append(coming[keys])
        if demand.kind != "prompt":
            coming[keys] = number
    return found[::-1]
