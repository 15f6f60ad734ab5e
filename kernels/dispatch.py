"""The one place that picks an operator's implementation; the model calls operators through it.

Two sets have the same operators: plain PyTorch, which defines them, and Triton's kernels
(`gpu/operators.py`). Tensors on a GPU go to Triton's; `CLOVER_KERNELS` (`choice.py`) overrides
that. On a CPU products with packed weights have compiled kernels. Triton is loaded only where it
is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from clover_local.kernels import (
    block_attention,
    gated_delta_commit,
    gated_delta_preview,
    norms,
    residual,
)
from clover_local.kernels import linear as plain_linear
from clover_local.kernels import route as plain_route
from clover_local.kernels.block_attention import AttentionRows, KeysValues
from clover_local.kernels.choice import check_choice, on_gpu
from clover_local.kernels.experts import ExpertMatrices, expert_mlp
from clover_local.kernels.gated_delta_commit import (
    DeltaRecord,
    DeltaState,
    HeadShape,
    LayeredRecord,
    LayeredStates,
    MixerWeights,
    ProjectedRows,
)
from clover_local.kernels.gated_delta_preview import DiffusionWeights
from clover_local.kernels.linear import blocked_tensor, blocked_weight
from clover_local.kernels.native.build import Missing
from clover_local.kernels.native.launch import kernel_for
from clover_local.kernels.norms import rotary_angles
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.kernels.residual import MixedExperts, Started, sum_places
from clover_local.kernels.route import AnyRouting, Routing

if TYPE_CHECKING:
    from clover_local.kernels.gpu.experts.record import ExpertSlots
    from clover_local.kernels.gpu.route import SortedRouting

__all__ = [
    "AnyRouting",
    "AttentionRows",
    "DeltaRecord",
    "DeltaState",
    "DiffusionWeights",
    "ExpertMatrices",
    "HeadShape",
    "KeysValues",
    "LayeredRecord",
    "LayeredStates",
    "MixedExperts",
    "MixerWeights",
    "ProjectedRows",
    "Routing",
    "add_rms_norm",
    "attend_commit",
    "attend_preview",
    "blocked_tensor",
    "blocked_weight",
    "check_choice",
    "distinct_experts",
    "expert_mlp",
    "expert_results",
    "expert_slots",
    "linear",
    "mix_commit",
    "mix_preview",
    "mix_verify",
    "norm_rotary",
    "on_gpu",
    "plain_routing",
    "replay",
    "replay_layers",
    "rms_norm",
    "rotary_angles",
    "route",
    "route_coreset",
    "router_linear",
    "shared_result",
    "shared_slots",
    "sorted_routing",
    "start_pass",
    "sum_places",
    "weight_kernel",
]


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
    """A pass's embedded rows, their norm, and rotary angles; see `residual.py`."""
    run = residual.start_pass
    if on_gpu(ids):
        from clover_local.kernels.gpu import operators

        run = operators.start_pass
    return run(ids, embedding=embedding, norm=norm, eps=eps, length=length, cos=cos, sin=sin)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Zero-centred RMSNorm; see `norms.py`."""
    if on_gpu(x):
        from clover_local.kernels.gpu import operators

        return operators.rms_norm(x, weight, eps=eps)
    return norms.rms_norm(x, weight, eps=eps)


def add_rms_norm(
    hidden_states: Tensor, update: Tensor | MixedExperts, *, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """hidden_states + update, and the norm of that; see `residual.py`."""
    if on_gpu(hidden_states):
        from clover_local.kernels.gpu import operators

        return operators.add_rms_norm(hidden_states, update, weight=weight, eps=eps)
    return residual.add_rms_norm(hidden_states, update, weight=weight, eps=eps)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed; see `linear.py`."""
    if isinstance(weight, PackedWeight) and on_gpu(x):
        from clover_local.kernels.gpu import operators

        return operators.packed_linear(x, weight)
    return plain_linear.linear(x, weight)


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [M, K] times `weight` [N, K] float32 transposed, in float32: [M, N]."""
    if on_gpu(x):
        from clover_local.kernels.gpu import operators

        return operators.router_linear(x, weight)
    return plain_linear.linear(x.float(), weight)


def plain_routing(routing: AnyRouting) -> Routing:
    """The routing alone, for operators that do not read what stands beside it."""
    if isinstance(routing, Routing):
        return routing
    return Routing(routing.expert_ids, routing.weights)


def sorted_routing(routing: AnyRouting) -> SortedRouting:
    """The routing with what Triton's kernels read.

    Raises:
        ValueError: it was not made on a GPU.
    """
    from clover_local.kernels.gpu.route import SortedRouting

    if not isinstance(routing, SortedRouting):
        raise ValueError("the routing is not sorted by expert: it was made by plain PyTorch")
    return routing


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
    """Norm and rotation of queries and keys; see `norms.py`."""
    apply = norms.norm_rotary
    if on_gpu(q):
        from clover_local.kernels.gpu import operators

        apply = operators.norm_rotary
    return apply(q, k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, eps=eps)


def attend_commit(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """Token-causal attention that writes to the cache; see `block_attention.py`."""
    if on_gpu(rows.q):
        from clover_local.kernels.gpu import operators

        return operators.attend_commit(rows, cache)
    return block_attention.attend_commit(rows, cache)


def attend_preview(rows: AttentionRows, cache: KeysValues) -> Tensor:
    """A block's attention, which only reads the cache; see `block_attention.py`."""
    if on_gpu(rows.q):
        from clover_local.kernels.gpu import operators

        return operators.attend_preview(rows, cache)
    return block_attention.attend_preview(rows, cache)


def mix_commit(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaState | None = None,
) -> tuple[Tensor, DeltaState]:
    """A GDN layer's commit between its projections; see `gated_delta_commit.py`."""
    if on_gpu(rows.qkv):
        from clover_local.kernels.gpu import operators

        return operators.mix_commit(rows, weights, before=before, into=into)
    return gated_delta_commit.mix_commit(rows, weights, before=before, into=into)


def mix_verify(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    before: DeltaState,
    into: DeltaRecord | None = None,
) -> tuple[Tensor, DeltaRecord]:
    """A GDN layer over rows that may not count; see `gated_delta_commit.py`."""
    if on_gpu(rows.qkv):
        from clover_local.kernels.gpu import operators

        return operators.mix_verify(rows, weights, before=before, into=into)
    return gated_delta_commit.mix_verify(rows, weights, before=before, into=into)


def replay(
    record: DeltaRecord, *, rows: int, before: DeltaState, into: DeltaState | None = None
) -> DeltaState:
    """The state after the first rows of a record; see `gated_delta_commit.py`."""
    if on_gpu(record.mixed):
        from clover_local.kernels.gpu import operators

        return operators.replay(record, rows=rows, before=before, into=into)
    return gated_delta_commit.replay(record, rows=rows, before=before, into=into)


def replay_layers(
    record: LayeredRecord, *, rows: int, before: LayeredStates, into: LayeredStates
) -> None:
    """The states of all layers after the first rows of a record; see `gated_delta_commit.py`."""
    run = gated_delta_commit.replay_layers
    if on_gpu(record.mixed):
        from clover_local.kernels.gpu import operators

        run = operators.replay_layers
    run(record, rows=rows, before=before, into=into)


def mix_preview(
    rows: ProjectedRows,
    weights: MixerWeights,
    *,
    diffusion: DiffusionWeights,
    before: DeltaState,
    block_size: int,
) -> Tensor:
    """A GDN layer's preview between its projections; see `gated_delta_preview.py`."""
    mix = gated_delta_preview.mix_preview
    if on_gpu(rows.qkv):
        from clover_local.kernels.gpu import operators

        mix = operators.mix_preview
    return mix(rows, weights, diffusion=diffusion, before=before, block_size=block_size)


def route(router_logits: Tensor, *, top_k: int) -> AnyRouting:
    """The experts of rows that may use every expert; see `route.py`. On a GPU sorted by expert."""
    if on_gpu(router_logits):
        from clover_local.kernels.gpu import operators

        return operators.route(router_logits, top_k=top_k)
    return plain_route.route(router_logits, top_k=top_k)


def route_coreset(router_logits: Tensor, *, top_k: int, top_p: float) -> tuple[AnyRouting, Tensor]:
    """The experts of one block's rows inside its coreset [E] bool; see `route.py`."""
    if on_gpu(router_logits):
        from clover_local.kernels.gpu import operators

        return operators.route_coreset(router_logits, top_k=top_k, top_p=top_p)
    return plain_route.route_coreset(router_logits, top_k=top_k, top_p=top_p)


def distinct_experts(expert_ids: Sequence[Tensor], num_experts: int) -> Tensor:
    """Experts that a pass uses, summed over its layers; see `route.py`."""
    if expert_ids and on_gpu(expert_ids[0]):
        from clover_local.kernels.gpu import operators

        return operators.distinct_experts(expert_ids, num_experts)
    return plain_route.distinct_experts(expert_ids, num_experts)


def expert_slots(gate_up: Sequence[Weight], down: Sequence[Weight]) -> ExpertSlots | None:
    """A layer's experts as records on their device, a copy, where Triton's kernels take them.

    Args:
        gate_up: of each expert [2F, D], gate first.
        down: of each expert [D, F].

    Returns:
        None for experts that are not packed or of different formats, and where there is no GPU.
    """
    packed = [weight for weight in (*gate_up, *down) if isinstance(weight, PackedWeight)]
    if len(packed) < len(gate_up) + len(down) or not on_gpu(packed[0].data):
        return None
    from clover_local.kernels.gpu import operators

    count = len(gate_up)
    return operators.resident_slots(packed[:count], packed[count:])


def shared_slots(gate: Weight, up: Weight, *, down: Weight) -> ExpertSlots | None:
    """A shared expert as a record on its device, a copy; None as in `expert_slots`."""
    if (
        not isinstance(gate, PackedWeight)
        or not isinstance(up, PackedWeight)
        or not isinstance(down, PackedWeight)
        or not on_gpu(gate.data)
    ):
        return None
    from clover_local.kernels.gpu import operators

    return operators.shared_slots(gate, up, down=down)


def expert_results(x: Tensor, routing: SortedRouting, *, slots: ExpertSlots) -> Tensor:
    """Each choice's weighted result [T, A, D] float32; anything in places of no expert."""
    from clover_local.kernels.gpu import operators

    return operators.expert_results(x, routing, slots=slots)


def shared_result(x: Tensor, *, slots: ExpertSlots) -> Tensor:
    """The shared expert over rows [T, D]: [T, D] float32."""
    from clover_local.kernels.gpu import operators

    return operators.shared_result(x, slots=slots)


def weight_kernel(weight: Weight) -> str:
    """How a weight is stored and what multiplies with it, for people."""
    if isinstance(weight, Tensor):
        name = str(weight.dtype).removeprefix("torch.")
        return f"{name} by oneDNN" if weight.is_mkldnn else f"{name} by torch"
    if on_gpu(weight.data):
        by = "Triton"
    else:
        kernel = kernel_for(weight)
        by = f"torch ({kernel.reason})" if isinstance(kernel, Missing) else kernel.target.name
    return f"INT{weight.bits} in groups of {weight.group_size} by {by}"
