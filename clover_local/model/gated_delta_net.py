"""A Gated DeltaNet layer: convolution, delta rule or block softmax, gated norm."""

import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import (
    DeltaRecord,
    DeltaState,
    DiffusionWeights,
    HeadShape,
    MixerWeights,
    ProjectedRows,
)
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


def take_diffusion(take: Take) -> DiffusionWeights:
    """A layer's diffusion tensors."""
    return DiffusionWeights(
        right_taps=take_float32(take, "conv_right_weight").T.contiguous(),
        logit_scale=take_float32(take, "bd_softmax_logit_scale"),
        history_bias=take_float32(take, "bd_softmax_history_bias"),
        history_c=take_float32(take, "bd_softmax_history_c"),
    )


def heads_of(config: ModelConfig) -> HeadShape:
    """How the channels of these layers divide."""
    return HeadShape(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )


class GatedDeltaNet:
    """out_proj(gated_norm(mix(conv(in_proj(x)))))."""

    def __init__(
        self, config: ModelConfig, take: Take, *, diffusion: DiffusionWeights | None
    ) -> None:
        self.config = config
        self.diffusion = diffusion
        self.in_proj = Linear(*(take(f"in_proj_{name}.weight") for name in ("qkv", "z", "a", "b")))
        self.out_proj = Linear(take("out_proj.weight"))
        self.weights = MixerWeights(
            heads=heads_of(config),
            taps=take_float32(take, "conv1d.weight").T.contiguous(),
            rate=-take_float32(take, "A_log").exp(),
            dt_bias=take_float32(take, "dt_bias"),
            norm=take_float32(take, "norm.weight"),
            eps=config.rms_norm_eps,
        )

    def commit(
        self, x: Tensor, before: DeltaState, *, into: DeltaState | None = None
    ) -> tuple[Tensor, DeltaState]:
        """[T, D] to [T, D], and the state after the rows, in `into` or in new tensors."""
        mixed, after = dispatch.mix_commit(self._project(x), self.weights, before=before, into=into)
        return self.out_proj(mixed.flatten(1)), after

    def verify(
        self, x: Tensor, before: DeltaState, *, into: DeltaRecord | None = None
    ) -> tuple[Tensor, DeltaRecord]:
        """As `commit`, but with a record of the rows in place of the state after them."""
        mixed, record = dispatch.mix_verify(
            self._project(x), self.weights, before=before, into=into
        )
        return self.out_proj(mixed.flatten(1)), record

    def preview(self, x: Tensor, before: DeltaState) -> Tensor:
        """[B, D] to [B, D] over one block; only reads the state.

        Raises:
            ValueError: the model has no diffusion tensors.
        """
        if self.diffusion is None:
            raise ValueError("this model has no diffusion tensors: it can commit, not preview")
        mixed = dispatch.mix_preview(
            self._project(x),
            self.weights,
            diffusion=self.diffusion,
            before=before,
            block_size=self.config.block_size,
        )
        return self.out_proj(mixed.flatten(1))

    def _project(self, x: Tensor) -> ProjectedRows:
        heads = self.weights.heads
        sizes = [heads.channels, heads.value_heads * heads.value_dim, *[heads.value_heads] * 2]
        qkv, z, a, b = torch.split(self.in_proj(x), sizes, dim=-1)
        return ProjectedRows(qkv, z.view(-1, heads.value_heads, heads.value_dim), a, b)
