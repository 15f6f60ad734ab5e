"""sum = hidden_states + update, normed = rms_norm(sum); the update may be what experts gave.

The end of one half of a layer and the start of the next: on a GPU the experts' sum, the shared
expert's share, the residual sum and the norm that follows are one launch (`gpu/experts/add_norm`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.kernels.norms import rms_norm


@dataclass(frozen=True, eq=False)
class MixedExperts:
    """What a layer's experts gave, not added up yet."""

    results: Tensor  # [T, P, D] float32: each choice's, weighted; anything in places of no expert
    expert_ids: Tensor | None  # [T, P] int64, -1: no expert, its place is not read; None: all count
    shared: Tensor  # [T, D], any float dtype
    shared_gate: Tensor  # [T, 1] float32, logits

    def sum(self) -> Tensor:
        """The places in order, then shared * sigmoid(shared_gate): [T, D] float32."""
        routed = sum_places(self.results, self.expert_ids)
        return routed + self.shared.float() * self.shared_gate.sigmoid()


def sum_places(results: Tensor, expert_ids: Tensor | None) -> Tensor:
    """results [T, P, D] over P in order, without places whose id is -1: [T, D]."""
    places = list(results.unbind(1))
    if expert_ids is not None:
        used = (expert_ids >= 0).unbind(1)
        places = [
            torch.where(u[:, None], place, 0.0) for u, place in zip(used, places, strict=True)
        ]
    total = places[0]
    for place in places[1:]:
        total = total + place
    return total


def add_rms_norm(
    hidden_states: Tensor, update: Tensor | MixedExperts, *, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """hidden_states + update, and the zero-centred RMSNorm of that: both [T, D], one dtype.

    Args:
        hidden_states: [T, D].
        update: [T, D] of that dtype, or experts, whose sum is rounded to it first.
        weight: [D] float32.
        eps: added to the mean square.
    """
    if isinstance(update, MixedExperts):
        update = update.sum().to(hidden_states.dtype)
    total = hidden_states + update
    return total, rms_norm(total, weight, eps=eps)
