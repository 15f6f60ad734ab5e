"""y = x / sqrt(mean(x^2) + eps) * (1 + weight); and the gated norm, the l2 norm, and rotation.

All of it in float32, whatever the dtype of `x`; results have the dtype of `x`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Zero-centred RMSNorm over the last dimension: `x` [..., D], `weight` [D]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, *, gate: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate): `x` and `gate` [..., D], `weight` [D].

    The weight is plain (no 1 +). The result has the dtype of `gate`, since `x` comes from float32
    state.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float() * F.silu(gate.float())).to(gate.dtype)


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32: for queries and keys."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def norm_rotary(
    q: Tensor,
    k: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, then `rotary`, of queries [T, H, D] and keys [T, H_kv, D]."""
    q = rotary(rms_norm(q, q_weight, eps=eps), cos=cos, sin=sin)
    return q, rotary(rms_norm(k, k_weight, eps=eps), cos=cos, sin=sin)


def rotary_angles(positions: Tensor, *, theta: float, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, rotary_dim / 2] float32, of position * theta^(-2i / rotary_dim).

    The angles are float64: in float32 a position of 100,000 would be off by a hundredth of a
    radian.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * theta ** (-exponents / rotary_dim)
    return angles.cos().float(), angles.sin().float()


def rotary(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 * R dimensions of `x` [T, H, Dh]; `cos` and `sin` [T, R].

    Dimension i pairs with i + R (half-split); the dimensions after 2 * R stay as they are.
    """
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
