"""What a GDN layer does between its projections, in three launches of a commit or two of a preview.

Defined by the plain operators of the same names.
"""

import torch
from torch import Tensor

from clover_local.kernels.gated_delta_commit import (
    DeltaRecord,
    DeltaState,
    LayeredRecord,
    LayeredStates,
    MixerWeights,
    ProjectedRows,
)
from clover_local.kernels.gated_delta_preview import DiffusionWeights
from clover_local.kernels.gpu.delta.gated_delta_chunked import gated_delta_chunked
from clover_local.kernels.gpu.delta.gated_delta_commit import (
    gated_delta_outputs,
    gated_delta_recurrent,
    gated_delta_replay,
)
from clover_local.kernels.gpu.delta.gated_delta_conv import (
    Gates,
    commit_conv,
    preview_conv,
    verify_conv,
)
from clover_local.kernels.gpu.delta.gated_delta_preview import normed_block_softmax
from clover_local.kernels.gpu.delta.keep_last import keep_last
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
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaRecord | None = None,
) -> tuple[Tensor, DeltaRecord]:
    """As the plain operator of this name; at most 64 rows."""
    if into is None:
        qkv, heads = rows.qkv, weights.heads
        room = LayeredRecord.empty(1, len(qkv), heads=heads, dtype=qkv.dtype, device=qkv.device)
        (into,) = room.layers
    mixed = verify_conv(
        rows.qkv, before.conv, taps=weights.taps, gates=_gates(rows, weights), into=into
    )
    out = gated_delta_outputs(
        mixed.q, mixed.k, v=mixed.v, g=mixed.g, beta=mixed.beta, state=before.recurrent
    )
    return gated_rms_norm(out, weights.norm, gate=rows.z, eps=weights.eps), into


def replay(
    record: DeltaRecord, *, rows: int, before: DeltaState, into: DeltaState | None = None
) -> DeltaState:
    """As the plain operator of this name: the kernel's own loop again, so the same bits."""
    if into is None:
        into = DeltaState(torch.empty_like(before.recurrent), torch.empty_like(before.conv))
    parts = (x[None] for x in (record.inputs, record.mixed, record.g, record.beta))
    replay_layers(
        LayeredRecord(record.heads, *parts),
        rows=rows,
        before=LayeredStates(before.recurrent[None], before.conv[None]),
        into=LayeredStates(into.recurrent[None], into.conv[None]),
    )
    return into


def replay_layers(
    record: LayeredRecord, *, rows: int, before: LayeredStates, into: LayeredStates
) -> None:
    """As the plain operator of this name, in two launches for all layers."""
    some = record.first(rows)
    gated_delta_replay(
        some.heads.keys_of(some.mixed),
        v=some.heads.values_of(some.mixed),
        g=some.g,
        beta=some.beta,
        state=before.recurrent,
        new_state=into.recurrent,
    )
    keep_last(some.inputs, before.conv, new_conv=into.conv)


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
