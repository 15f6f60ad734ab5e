"""y[t] = sum_a weights[t, a] * down_e(silu(gate_e(x[t])) * up_e(x[t])), e = expert_ids[t, a].

Rows are sorted by expert so that each expert in use is read once. A row's expert results are then
added in float32 in routing order: which experts were at hand, and in which order they ran, cannot
change a bit.

Packed experts that a compiled kernel can read run together: all of a layer's `gate_up` products in
one parallel call, all of its `down` products in another. Others run one after the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clover_local.kernels.linear import linear
from clover_local.kernels.native.build import Kernel
from clover_local.kernels.native.launch import (
    Format,
    format_of,
    jobs_for,
    kernel_for,
    multiply,
    pointers,
    spread,
)
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.kernels.route import Routing

SERIAL = 32767
"""So many numbers torch gives to one thread: its grain, less one."""


@dataclass(frozen=True, eq=False)
class Alike:
    """Packed experts of one format, which one kernel runs."""

    kernel: Kernel
    layout: Format
    has: NDArray[np.bool_]  # [E]: which experts they are
    pointers: NDArray[np.int64]  # [E, 3], of those


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of x sorted by expert."""

    sources: Tensor  # [R]: the row of x that each is
    experts: NDArray[np.int64]  # experts in use, ascending
    starts: NDArray[np.int64]  # of each of those: its first row
    counts: NDArray[np.int64]


class ExpertMatrices:
    """A matrix [N, K] of each expert of a layer, ready to be multiplied."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        """Keeps the weights: packed, plain, or from `blocked_weight`."""
        self.weights = tuple(weights)
        kernels: dict[Format, Kernel] = {}
        members: dict[Format, list[int]] = {}
        for expert, weight in enumerate(self.weights):
            if isinstance(weight, PackedWeight):
                kernel = kernel_for(weight)
                if isinstance(kernel, Kernel):
                    kernels[format_of(weight)] = kernel
                    members.setdefault(format_of(weight), []).append(expert)
        self._groups = [
            self._alike(kernels[layout], layout, experts=experts)
            for layout, experts in members.items()
        ]
        self._alone = np.ones(len(self.weights), bool)
        for group in self._groups:
            self._alone &= ~group.has

    def multiply(self, x: Tensor, rows: Rows) -> Tensor:
        """Each of the rows times its expert's matrix, then a row of zeros: [T, K] to [R + 1, N]."""
        if not self._groups:
            parts = torch.split(x[rows.sources], rows.counts.tolist())
            products = zip(parts, rows.experts.tolist(), strict=True)
            results = [linear(part, self.weights[expert]) for part, expert in products]
            return torch.cat([*results, x.new_zeros(1, self.weights[0].shape[0])])
        out = torch.empty(len(rows.sources) + 1, self._groups[0].layout.shape[0])
        out[-1] = 0
        wide = x.float()
        for group in self._groups:
            used = group.has[rows.experts]
            if used.any():
                multiply(
                    group.kernel,
                    jobs_for(
                        rows.starts[used],
                        rows.counts[used],
                        weights=group.pointers[rows.experts[used]],
                    ),
                    layout=group.layout,
                    x=spread(group.kernel, wide, bits=group.layout.bits),
                    x_rows=rows.sources,
                    out=out,
                )
        for place in self._alone[rows.experts].nonzero()[0].tolist():
            start = int(rows.starts[place])
            here = slice(start, start + int(rows.counts[place]))
            out[here] = linear(x[rows.sources[here]], self.weights[int(rows.experts[place])])
        return out

    def _alike(self, kernel: Kernel, layout: Format, *, experts: list[int]) -> Alike:
        has = np.zeros(len(self.weights), bool)
        table = np.zeros((len(self.weights), 3), np.int64)
        for expert in experts:
            weight = self.weights[expert]
            assert isinstance(weight, PackedWeight)
            has[expert], table[expert] = True, pointers(weight)
        return Alike(kernel, layout, has, table)


def gated(hidden: Tensor) -> Tensor:
    """silu(gate) * up of rows [R, 2F], gate first; a row's bits do not depend on the others.

    On a CPU torch cuts large tensors for its threads anywhere, also within a row, and what is left
    of a vector at a cut is rounded in another way. So it gets rows that it does not cut.
    """
    gate, up = hidden.chunk(2, dim=-1)
    rows = max(1, SERIAL // gate.shape[1]) if hidden.device.type == "cpu" else len(hidden)
    if len(hidden) <= rows:
        return F.silu(gate) * up
    parts = zip(torch.split(gate, rows), torch.split(up, rows), strict=True)
    return torch.cat([F.silu(left) * right for left, right in parts])


def expert_mlp(
    x: Tensor,
    routing: Routing,
    *,
    gate_up: ExpertMatrices | Sequence[Weight],
    down: ExpertMatrices | Sequence[Weight],
) -> Tensor:
    """The routed experts' part of a MoE layer: [T, D], float32.

    Reads the row counts on the host, once.

    Args:
        x: [T, D].
        routing: A experts a row; -1 stands for none.
        gate_up: for each expert [2F, D], gate first; prepared once where they run often.
        down: for each expert [D, F], likewise.
    """
    gate_up, down = (
        weights if isinstance(weights, ExpertMatrices) else ExpertMatrices(weights)
        for weights in (gate_up, down)
    )
    per_row = routing.expert_ids.shape[1]
    flat = routing.expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=len(gate_up.weights) + 1).cpu().numpy()
    order = order[int(counts[0]) :]  # without the choices of no expert
    experts = counts[1:].nonzero()[0]
    counts = counts[1:][experts]
    starts = counts.cumsum() - counts
    none = len(order)  # the place of a choice that is not used: a row of zeros
    places = torch.full_like(flat, none).scatter(0, order, torch.arange(none, device=x.device))

    hidden = gate_up.multiply(x, Rows(order // per_row, experts, starts, counts))
    each = torch.arange(none, device=x.device)
    results = down.multiply(gated(hidden), Rows(each, experts, starts, counts))
    return _sum_in_routing_order(
        results, places.view(routing.expert_ids.shape), weights=routing.weights
    )


def _sum_in_routing_order(results: Tensor, places: Tensor, *, weights: Tensor) -> Tensor:
    """sum_a weights[t, a] * results[places[t, a]], added one choice after the other."""
    # A product, then sums: one fused call may round once or twice, depending on where a row lies.
    weighted = results[places].float().mul_(weights[..., None]).unbind(1)  # per choice [T, D]
    total = weighted[0]
    for choice in weighted[1:]:
        total = total + choice
    return total
