"""hidden_states[t] = embedding[ids[t]], their norm; cos[t], sin[t]: the tables' rows at length + t.

What a pass needs before its first layer. `length` is read on the device, so that the same launches
serve every position: a pass that is replayed has no position of its own.
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
