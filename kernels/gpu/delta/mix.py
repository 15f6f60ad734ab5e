"""What a GDN layer does between its projections, in three launches of a commit or two of a preview.

Defined by the plain operators of the same names.
"""

from functools import cache

import torch
from torch import Tensor

from clover_local.kernels.gated_delta_commit import (
    DeltaRecord,
    DeltaState,
    MixerWeights,
    ProjectedRows,
    conv_after,
)
from clover_local.kernels.gated_delta_preview import DiffusionWeights
from clover_local.kernels.gpu.delta.gated_delta_chunked import gated_delta_chunked
from clover_local.kernels.gpu.delta.gated_delta_commit import (
    gated_delta_recurrent,
    gated_delta_replay,
)
from clover_local.kernels.gpu.delta.gated_delta_conv import Gates, commit_conv, preview_conv
from clover_local.kernels.gpu.delta.gated_delta_preview import normed_block_softmax
from clover_local.kernels.gpu.norms import gated_rms_norm

RECURRENT_ROWS = 64
"""Up to here a loop over rows, which reads and writes the state once; prompts go by chunks."""


def mix_commit(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaState | None = None,
) -> tuple[Tensor, DeltaState]:
    """As the plain operator of this name."""
    mixed, conv = commit_conv(
        rows.qkv,
        before.conv,
        taps=weights.taps,
        gates=_gates(rows, weights),
        heads=weights.heads,
        new_conv_state=None if into is None else into.conv,
    )
    rule = gated_delta_recurrent if len(rows.qkv) <= RECURRENT_ROWS else gated_delta_chunked
    out, recurrent = rule(
        mixed.q,
        mixed.k,
        v=mixed.v,
        g=mixed.g,
        beta=mixed.beta,
        state=before.recurrent,
        new_state=None if into is None else into.recurrent,
    )
    normed = gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps)
    return normed, DeltaState(recurrent, conv)


def mix_verify(
    rows: ProjectedRows, weights: MixerWeights, *, before: DeltaState
) -> tuple[Tensor, DeltaRecord]:
    """As the plain operator of this name; at most 64 rows."""
    mixed, _ = commit_conv(
        rows.qkv,
        before.conv,
        taps=weights.taps,
        gates=_gates(rows, weights),
        heads=weights.heads,
    )
    out, _ = gated_delta_recurrent(
        mixed.q, mixed.k, v=mixed.v, g=mixed.g, beta=mixed.beta, state=before.recurrent
    )
    normed = gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps)
    return normed, DeltaRecord(rows.qkv, mixed.k, mixed.v, mixed.g, mixed.beta)


def replay(
    record: DeltaRecord, *, rows: int, before: DeltaState, into: DeltaState | None = None
) -> DeltaState:
    """As the plain operator of this name: the kernel's own loop again, so the same bits."""
    recurrent = gated_delta_replay(
        record.k,
        v=record.v,
        g=record.g,
        beta=record.beta,
        state=before.recurrent,
        counted=_counted(rows, before.recurrent.device),
        new_state=None if into is None else into.recurrent,
    )
    conv = conv_after(record.inputs[:rows], before.conv)
    if into is None:
        return DeltaState(recurrent, conv)
    into.conv.copy_(conv)
    return into


@cache
def _counted(rows: int, device: torch.device) -> Tensor:
    """A number of rows where the kernel reads it."""
    return torch.tensor([rows], dtype=torch.int32, device=device)


def mix_preview(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    diffusion: DiffusionWeights,
    before: DeltaState,
    block_size: int,
) -> Tensor:
    """As the plain operator of this name; at most 64 rows."""
    mixed = preview_conv(
        rows.qkv,
        before.conv,
        taps=weights.taps,
        right_taps=diffusion.right_taps,
        gates=_gates(rows, weights),
        heads=weights.heads,
    )
    return normed_block_softmax(
        mixed.q,
        mixed.k,
        v=mixed.v,
        g=mixed.g,
        state=before.recurrent,
        diffusion=diffusion,
        block_size=block_size,
        z=rows.z,
        norm_weight=weights.norm,
        eps=weights.eps,
    )


def _gates(rows: ProjectedRows, weights: MixerWeights) -> Gates:
    return Gates(a=rows.a, b=rows.b, rate=weights.rate, dt_bias=weights.dt_bias)
