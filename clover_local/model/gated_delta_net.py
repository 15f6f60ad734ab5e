"""A Gated DeltaNet layer: convolution, delta rule or block softmax, gated norm."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.kernels import dispatch
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class Diffusion:
    """The four tensors that only a preview needs, float32."""

    right_taps: Tensor  # [3, C]
    logit_scale: Tensor  # [H_v]
    history_bias: Tensor  # [H_v]
    history_c: Tensor  # [H_v]


def take_diffusion(take: Take) -> Diffusion:
    """A layer's diffusion tensors."""
    return Diffusion(
        right_taps=take_float32(take, "conv_right_weight").T.contiguous(),
        logit_scale=take_float32(take, "bd_softmax_logit_scale"),
        history_bias=take_float32(take, "bd_softmax_history_bias"),
        history_c=take_float32(take, "bd_softmax_history_c"),
    )


class GatedDeltaNet:
    """out_proj(gated_norm(mix(conv(in_proj(x)))))."""

    def __init__(self, config: ModelConfig, take: Take, *, diffusion: Diffusion | None) -> None:
        self.config = config
        self.diffusion = diffusion
        self.in_proj = Linear(*(take(f"in_proj_{name}.weight") for name in ("qkv", "z", "a", "b")))
        self.out_proj = Linear(take("out_proj.weight"))
        self.taps = take_float32(take, "conv1d.weight").T.contiguous()  # [4, C]
        self.rate = -take_float32(take, "A_log").exp()  # [H_v]
        self.dt_bias = take_float32(take, "dt_bias")
        self.norm = take_float32(take, "norm.weight")

    def commit(
        self, x: Tensor, recurrent_state: Tensor, *, conv_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, D] to [T, D], and the new recurrent and conv state; those given stay as they are."""
        qkv, z, g, beta = self._project(x)
        y, conv_state = dispatch.causal_conv(qkv, conv_state, taps=self.taps)
        q, k, v = self._heads(y)
        out, recurrent_state = dispatch.gated_delta_commit(
            q, k, v=v, g=g, beta=beta, state=recurrent_state
        )
        return self._finish(out, z), recurrent_state, conv_state

    def preview(self, x: Tensor, recurrent_state: Tensor, *, conv_state: Tensor) -> Tensor:
        """[B, D] to [B, D] over one block.

        Raises:
            ValueError: the model has no diffusion tensors.
        """
        if self.diffusion is None:
            raise ValueError("this model has no diffusion tensors: it can commit, not preview")
        qkv, z, g, _ = self._project(x)
        y = dispatch.block_conv(
            qkv, conv_state, taps=self.taps, right_taps=self.diffusion.right_taps
        )
        q, k, v = self._heads(y)
        out = dispatch.block_softmax(
            q,
            k,
            v=v,
            g=g,
            state=recurrent_state,
            logit_scale=self.diffusion.logit_scale,
            history_bias=self.diffusion.history_bias,
            history_c=self.diffusion.history_c,
            block_size=self.config.block_size,
        )
        return self._finish(out, z)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [T, C], z [T, H_v, Dv], g and beta [T, H_v] float32."""
        c = self.config
        heads, dv = c.linear_num_value_heads, c.linear_value_head_dim
        qkv, z, a, b = torch.split(self.in_proj(x), [c.qkv_dim, heads * dv, heads, heads], dim=-1)
        g = self.rate * F.softplus(a.float() + self.dt_bias)
        return qkv, z.view(-1, heads, dv), g, b.float().sigmoid()

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [T, H_k, Dk] with unit length, v [T, H_v, Dv]."""
        c = self.config
        key_heads, dk = c.linear_num_key_heads, c.linear_key_head_dim
        both = dispatch.l2_norm(y[:, : 2 * key_heads * dk].view(len(y), 2 * key_heads, dk))
        q, k = both.chunk(2, dim=1)
        v = y[:, 2 * key_heads * dk :].view(len(y), c.linear_num_value_heads, -1)
        return q, k, v

    def _finish(self, out: Tensor, z: Tensor) -> Tensor:
        normed = dispatch.gated_rms_norm(out, self.norm, gate=z, eps=self.config.rms_norm_eps)
        return self.out_proj(normed.flatten(1))
