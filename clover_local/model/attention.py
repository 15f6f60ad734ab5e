"""A full-attention layer: gated queries, grouped heads, q and k normed and partly rotated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AttentionRows, KeysValues
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class Angles:
    """Rotary cosine and sine of some positions, each [T, R / 2] float32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(
        cls, start: int, *, rows: int, config: ModelConfig, device: torch.device | str
    ) -> "Angles":
        """Those of `rows` positions from `start` on."""
        positions = torch.arange(start, start + rows, device=device)
        cos, sin = dispatch.rotary_angles(
            positions, theta=config.rope_theta, rotary_dim=config.rotary_dim
        )
        return cls(cos, sin)


class Attention:
    """o_proj(attend(q, K, V) * sigmoid(gate))."""

    def __init__(self, config: ModelConfig, take: Take, *, layer: int) -> None:
        self.config = config
        self.layer = layer
        self.qkv_proj = Linear(*(take(f"{name}_proj.weight") for name in "qkv"))
        self.o_proj = Linear(take("o_proj.weight"))
        self.q_norm = take_float32(take, "q_norm.weight")
        self.k_norm = take_float32(take, "k_norm.weight")

    def commit(self, x: Tensor, cache: KeysValues, *, angles: Angles) -> Tensor:
        """Token-causal; writes this pass's keys and values to `cache`. [T, D] to [T, D]."""
        rows = self._project(x, angles)
        return self.o_proj(dispatch.attend_commit(rows, cache).flatten(1))

    def preview(self, x: Tensor, cache: KeysValues, *, angles: Angles) -> Tensor:
        """Each row sees all committed rows and the whole block; nothing changes. [B, D]."""
        rows = self._project(x, angles)
        return self.o_proj(dispatch.attend_preview(rows, cache).flatten(1))

    def _project(self, x: Tensor, angles: Angles) -> AttentionRows:
        c = self.config
        q_size, kv_size = 2 * c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q, k, v = torch.split(self.qkv_proj(x), [q_size, kv_size, kv_size], dim=-1)
        q, gate = q.view(len(x), c.num_attention_heads, 2 * c.head_dim).chunk(2, dim=-1)
        k, v = (y.view(len(x), c.num_key_value_heads, c.head_dim) for y in (k, v))
        q, k = dispatch.norm_rotary(
            q,
            k,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            cos=angles.cos,
            sin=angles.sin,
            eps=c.rms_norm_eps,
        )
        return AttentionRows(q=q, k=k, v=v, gate=gate)
