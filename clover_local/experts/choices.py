"""What the rows of a layer ask of its experts, sorted by expert, on the host; and who computes it.

A wave computes some of the experts and writes their places of `results`; the sum over the places
comes last and in routing order. All rows of an expert are in one product, in whatever wave, as they
are where every expert is resident: a product may round a row differently in other company.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.experts.slots import Matrices
from clover_local.kernels.dispatch import AnyRouting
from clover_local.kernels.experts import Rows, gated
from clover_local.residency.demand import IntArray


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of a layer's rows; choice t * A + a is row t's a-th expert."""

    ids: IntArray  # [T * A], -1: none
    per_row: int  # A
    experts: IntArray  # in use, ascending
    counts: IntArray  # rows of each of those

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int) -> "Choices":
        """From [T, A]; waits for the device."""
        ids = expert_ids.cpu().numpy().ravel()
        counts = np.bincount(ids + 1, minlength=num_experts + 1)[1:]
        experts = np.flatnonzero(counts)
        return cls(ids, expert_ids.shape[1], experts, counts[experts])

    @cached_property
    def order(self) -> IntArray:
        """[R]: the choices by expert, rising among equals, without those of no expert."""
        unused = len(self.ids) - int(self.counts.sum())
        order: IntArray = np.argsort(self.ids, kind="stable")[unused:]
        return order

    def of_experts(self, places: IntArray) -> IntArray:
        """The choices of the experts at `places`, in the same order."""
        if len(places) == len(self.experts):
            return self.order
        starts = self.counts.cumsum() - self.counts
        counts = self.counts[places]
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        chosen: IntArray = self.order[np.repeat(starts[places], counts) + within]
        return chosen


def compute_matrices(
    x: Tensor,
    routing: AnyRouting,
    choices: Choices,
    *,
    places: IntArray,
    matrices: Matrices,
    results: Tensor,
) -> None:
    """Some experts by products, as `kernels/experts.py` has them.

    Args:
        x: [T, D].
        routing: of these rows.
        choices: the same on the host.
        places: in `choices.experts`, ascending: whom to compute.
        matrices: theirs.
        results: [T, A, D] float32: their places are written.
    """
    gate_up, down, members = matrices
    chosen, counts = choices.of_experts(places), choices.counts[places]
    starts = counts.cumsum() - counts
    sources = _on(x.device, chosen // choices.per_row)
    hidden = gate_up.multiply(x, Rows(sources, members, starts, counts))
    each = _on(x.device, np.arange(len(chosen)))
    out = down.multiply(gated(hidden), Rows(each, members, starts, counts))[:-1]
    target = _on(x.device, chosen)
    weights = routing.weights.flatten()[target]
    results.view(-1, results.shape[-1])[target] = out.float() * weights[:, None]


def _on(device: torch.device, numbers: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(numbers).to(device)
