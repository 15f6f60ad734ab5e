"""A full-attention layer: gated queries, grouped heads, q and k normed and partly rotated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.kernels import dispatch
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class Angles:
    """Rotary cosine and sine of a pass's rows, each [T, R / 2] float32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(
        cls, start: int, *, rows: int, config: ModelConfig, device: torch.device | str
    ) -> "Angles":
        """Those of `rows` rows from position `start` on."""
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

    def commit(self, x: Tensor, state: SequenceState, *, angles: Angles) -> Tensor:
        """Token-causal; appends this pass's keys and values to `state`. [T, D] to [T, D]."""
        q, gate, k, v = self._project(x, angles)
        keys, values = state.append(self.layer, k, values=v)
        return self._finish(dispatch.causal_attention(q, keys, values=values), gate)

    def preview(self, x: Tensor, state: SequenceState, *, angles: Angles) -> Tensor:
        """Each row sees all committed rows and the whole block; appends nothing. [B, D]."""
        q, gate, k, v = self._project(x, angles)
        committed_keys, committed_values = state.keys_values(self.layer)
        keys, values = torch.cat([committed_keys, k]), torch.cat([committed_values, v])
        return self._finish(dispatch.block_attention(q, keys, values=values), gate)

    def _project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and gate [T, H, Dh], k and v [T, H_kv, Dh]; q and k normed and rotated."""
        c = self.config
        q_size, kv_size = 2 * c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q, k, v = torch.split(self.qkv_proj(x), [q_size, kv_size, kv_size], dim=-1)
        q, gate = q.view(len(x), c.num_attention_heads, 2 * c.head_dim).chunk(2, dim=-1)
        k, v = (y.view(len(x), c.num_key_value_heads, c.head_dim) for y in (k, v))
        q = dispatch.rms_norm(q, self.q_norm, eps=c.rms_norm_eps)
        k = dispatch.rms_norm(k, self.k_norm, eps=c.rms_norm_eps)
        q, k = (dispatch.rotary(y, cos=angles.cos, sin=angles.sin) for y in (q, k))
        return q, gate, k, v

    def _finish(self, attended: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj((attended * gate.sigmoid()).flatten(1))
