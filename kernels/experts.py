"""y[t] = sum_a weights[t, a] * down_e(silu(gate_e(x[t])) * up_e(x[t])), e = expert_ids[t, a].

Rows are sorted by expert so that each expert in use is read once. A row's expert results are then
added in float32 in routing order: which experts were at hand, and in which order they ran, cannot
change a bit.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.linear import linear
from clover_local.kernels.route import Routing


def expert_mlp(
    x: Tensor, routing: Routing, *, gate_up: Sequence[Tensor], down: Sequence[Tensor]
) -> Tensor:
    """The routed experts' part of a MoE layer: [T, D], float32.

    Reads the row counts on the host, once.

    Args:
        x: [T, D].
        routing: A experts a row; -1 stands for none.
        gate_up: for each expert [2F, D], gate first, plain or from `blocked_weight`.
        down: for each expert [D, F], likewise.
    """
    rows, per_row = routing.expert_ids.shape
    flat = routing.expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=len(gate_up) + 1).tolist()
    unused, counts = counts[0], counts[1:]
    order = order[unused:]
    used = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in used]

    inputs = torch.split(x[order // per_row], sizes)  # per expert [rows, D]
    hidden = torch.cat(
        [linear(part, gate_up[expert]) for part, expert in zip(inputs, used, strict=True)]
    )
    gate, up = hidden.chunk(2, dim=-1)
    active = torch.split(F.silu(gate) * up, sizes)  # per expert [rows, F]
    results = [linear(part, down[expert]) for part, expert in zip(active, used, strict=True)]
    none = len(order)  # the place of a choice that is not used: a row of zeros
    places = torch.full_like(flat, none).scatter(0, order, torch.arange(none, device=x.device))
    return _sum_in_routing_order(
        torch.cat([*results, x.new_zeros(1, x.shape[1])]),
        places.view(rows, per_row),
        weights=routing.weights,
    )


def _sum_in_routing_order(results: Tensor, places: Tensor, *, weights: Tensor) -> Tensor:
    """sum_a weights[t, a] * results[places[t, a]], added one choice after the other."""
    # A product, then sums: one fused call may round once or twice, depending on where a row lies.
    weighted = results[places].float().mul_(weights[..., None]).unbind(1)  # per choice [T, D]
    total = weighted[0]
    for choice in weighted[1:]:
        total = total + choice
    return total
