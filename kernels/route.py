"""probs = softmax(router_logits); the A largest of a row, weighted by probs / (their sum).

Also the coreset of a block. Everything stays on the device and no shape depends on a value, so that
a pass never waits for the host: a row that may use fewer than A experts has expert id -1 and weight
0 in the places that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each row uses, best first."""

    expert_ids: Tensor  # [T, A] int64, -1 where a row uses fewer than A experts
    weights: Tensor  # [T, A] float32, each row sums to 1


class AnyRouting(Protocol):
    """A routing, with whatever the kernels that made it put beside it."""

    @property
    def expert_ids(self) -> Tensor:
        """[T, A] int64, -1 where a row uses fewer than A experts."""

    @property
    def weights(self) -> Tensor:
        """[T, A] float32, each row sums to 1."""


def route(router_logits: Tensor, *, top_k: int) -> Routing:
    """The `top_k` largest of each row of `router_logits` [T, E]; a lower index wins a tie."""
    # Softmax keeps order, and the softmax of the chosen logits is the chosen probabilities divided
    # by their sum, without the ties and the 0 / 0 of probabilities that underflow. A stable sort,
    # because topk promises nothing about ties.
    ranked = router_logits.float().sort(dim=-1, descending=True, stable=True)
    return Routing(ranked.indices[:, :top_k], ranked.values[:, :top_k].softmax(-1))


def route_coreset(router_logits: Tensor, *, top_k: int, top_p: float) -> tuple[Routing, Tensor]:
    """Routes the rows of a block inside its coreset; returns the routing, the coreset [E] bool."""
    coreset = block_coreset(router_logits, top_k=top_k, top_p=top_p)
    allowed = router_logits.float().masked_fill(~coreset, -torch.inf)
    inside = route(allowed, top_k=top_k)
    expert_ids = inside.expert_ids.masked_fill(inside.weights == 0, -1)
    # A weight that underflowed to 0 is dropped too: an expert with weight 0 adds nothing.
    return Routing(expert_ids, inside.weights), coreset


def distinct_experts(expert_ids: Sequence[Tensor], num_experts: int) -> Tensor:
    """Experts that a pass uses, summed over its layers: a float64 scalar that stays on the device.

    Args:
        expert_ids: per layer [T, A], -1 where a row used fewer.
        num_experts: E.
    """
    if not expert_ids:
        return torch.zeros((), dtype=torch.float64)
    ids = torch.stack([layer.flatten() for layer in expert_ids]) + 1  # [L, T * A]
    used = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool, device=ids.device)
    return used.scatter_(1, ids, True)[:, 1:].sum().double()


def block_coreset(router_logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """The experts [E] bool that a block with `router_logits` [B, E] may use.

    Experts by falling total probability over the rows that have them in their own top `top_k`,
    while the share kept before is below `top_p`; the first always, one that no row chose never.
    """
    probs = router_logits.float().softmax(-1)
    chosen = route(router_logits, top_k=top_k).expert_ids
    totals = torch.zeros_like(probs).scatter(1, chosen, probs.gather(1, chosen)).sum(0)
    ranked = totals.sort(descending=True, stable=True)
    # float64, E numbers: in float32 the running sum may reach 1 before the last expert.
    mass = ranked.values.double().cumsum(0) / ranked.values.double().sum()
    kept = mass.roll(1) < top_p
    kept[0] = True
    kept &= ranked.values > 0
    return torch.zeros_like(kept).scatter(0, ranked.indices, kept)
