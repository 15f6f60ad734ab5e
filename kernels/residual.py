"""The residual stream: what a pass starts it with, and what each half of a layer adds to it.

    start   hidden_states[t] = embedding[ids[t]], their norm; the rotary tables' rows at length + t
    add     sum = hidden_states + update, rms_norm(sum); the update may be what experts gave

On a GPU each is one launch (`gpu/start.py`, `gpu/experts/add_norm.py`): the start reads `length`
there, so that the same launches serve every position (a pass that is replayed has no position of
its own); the sum has the experts' sum and the shared expert's share in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.kernels.norms import rms_norm


@dataclass(frozen=True, eq=False)
class Started:
    """The rows of a pass before its first layer."""

    hidden_states: Tensor  # [T, D]
    normed: Tensor  # [T, D], for the first layer
    cos: Tensor  # [T, R / 2] float32
    sin: Tensor  # likewise


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


def start_pass(
    ids: Tensor,
    *,
    embedding: Tensor,
    norm: Tensor,
    eps: float,
    length: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Started:
    """The embedded rows of a pass behind `length` committed tokens, and their rotary angles.

    Args:
        ids: [T] int64.
        embedding: [V, D]; may lie on the host while `ids` are on a device.
        norm: [D], the weight of the first layer's norm; `eps` is in it.
        length: [1] int32; a row whose position is behind the tables has their last row.
        cos: [N, R / 2] float32, by position.
        sin: likewise.
    """
    hidden_states = embedding[ids.to(embedding.device)].to(ids.device)
    rows = torch.arange(len(ids), device=ids.device)
    positions = (length.long() + rows).clamp(max=len(cos) - 1)
    normed = rms_norm(hidden_states, norm, eps=eps)
    return Started(hidden_states, normed, cos[positions], sin[positions])


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
