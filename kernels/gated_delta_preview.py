"""o[t] = sum_s p[t, s] v[s] + p[t, B] exp(g[t]) S^T q[t] / sqrt(Dk).

p[t] is a softmax over the block's B rows and one history slot that stands for all before it.

Reads the state and the conv state of the block's start and writes neither. Shapes as in
`gated_delta_commit`; B rows, one block. `mix_preview` is all that a GDN layer does in a preview
between its two projections.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.gated_delta_commit import (
    DeltaState,
    MixerWeights,
    ProjectedRows,
    log_decay,
    split_heads,
)
from clover_local.kernels.norms import gated_rms_norm


@dataclass(frozen=True, eq=False)
class DiffusionWeights:
    """What a GDN layer has for previews alone; float32."""

    right_taps: Tensor  # [R, C]
    logit_scale: Tensor  # [H_v]
    history_bias: Tensor  # [H_v]
    history_c: Tensor  # [H_v]


def mix_preview(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    diffusion: DiffusionWeights,
    before: DeltaState,
    block_size: int,
) -> Tensor:
    """Convolution to both sides, block softmax and gated norm of one block's rows.

    Args:
        rows: of this pass.
        weights: the layer's.
        diffusion: likewise.
        before: the state before the block, only read.
        block_size: the config's, whatever the B of this block.

    Returns:
        [B, H_v, Dv] of the dtype of z.
    """
    y = block_conv(rows.qkv, before.conv, taps=weights.taps, right_taps=diffusion.right_taps)
    q, k, v = split_heads(y, weights.heads)
    out = block_softmax(
        q,
        k,
        v=v,
        g=log_decay(rows, weights),
        state=before.recurrent,
        logit_scale=diffusion.logit_scale,
        history_bias=diffusion.history_bias,
        history_c=diffusion.history_c,
        block_size=block_size,
    )
    return gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps)


def block_conv(qkv: Tensor, conv_state: Tensor, *, taps: Tensor, right_taps: Tensor) -> Tensor:
    """y[t] = silu(sum_j in[t + j] * taps[j] + sum_d qkv[t + d] * right_taps[d - 1]).

    in = [conv_state | qkv]; d runs from 1 while t + d < B.

    Args:
        qkv: [B, C].
        conv_state: [J - 1, C] float32, the rows before the block.
        taps: [J, C] float32, as in `causal_conv`.
        right_taps: [R, C] float32; tap d - 1 multiplies the row d positions later.
    """
    size, left = len(qkv), len(taps)
    after = qkv.new_zeros(len(right_taps), qkv.shape[1], dtype=torch.float32)
    rows = torch.cat([conv_state, qkv.float(), after])
    y = rows[:size] * taps[0]
    for j in range(1, left):
        y.addcmul_(rows[j : j + size], taps[j])
    for d in range(len(right_taps)):
        y.addcmul_(rows[left + d : left + d + size], right_taps[d])
    return F.silu(y)


def block_softmax(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    logit_scale: Tensor,
    history_bias: Tensor,
    history_c: Tensor,
    block_size: int,
) -> Tensor:
    """Returns o [B, H_v, Dv].

    `logit_scale`, `history_bias` and `history_c` are [H_v] float32; `block_size` is the config's,
    whatever the B of this block: the history slot's logit is history_bias + history_c * ln(B /
    block_size).
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.transpose(0, 1).repeat_interleave(repeats, dim=0) for x in (q, k))  # [H_v, B, Dk]
    size = q.shape[1]
    scores = q @ k.mT * logit_scale[:, None, None]
    history = history_bias + history_c * math.log(size / block_size)
    slots = torch.cat([scores, history[:, None, None].expand(-1, size, 1)], dim=-1).softmax(-1)
    remembered = (q * q.shape[-1] ** -0.5) @ state  # [H_v, B, Dv]
    remembered = remembered * (slots[..., size:] * g.exp().T[..., None])
    mixed: Tensor = slots[..., :size] @ v.transpose(0, 1) + remembered
    return mixed.transpose(0, 1)
