"""The operators of `dispatch.py` in Triton: what a pass calls, each one launch or a few."""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.gpu import distinct
from clover_local.kernels.gpu.attention.attend import attend_commit, attend_preview
from clover_local.kernels.gpu.delta.mix import (
    mix_commit,
    mix_preview,
    mix_verify,
    replay,
    replay_layers,
)
from clover_local.kernels.gpu.experts.add_norm import add_rms_norm
from clover_local.kernels.gpu.experts.int4_experts import expert_results
from clover_local.kernels.gpu.experts.record import ExpertSlots, resident_slots
from clover_local.kernels.gpu.experts.shared import every_row, shared_expert, shared_slots
from clover_local.kernels.gpu.linear import float32_linear
from clover_local.kernels.gpu.linear import packed_linear as packed
from clover_local.kernels.gpu.norms import norm_rotary, rms_norm
from clover_local.kernels.gpu.route import (
    BLOCK_ROWS,
    SortedRouting,
    route_coreset_sorted,
    route_sorted,
)
from clover_local.kernels.gpu.route_prompt import route_prompt_sorted
from clover_local.kernels.gpu.start import start_pass
from clover_local.kernels.packed import PackedWeight

__all__ = [
    "add_rms_norm",
    "attend_commit",
    "attend_preview",
    "distinct_experts",
    "expert_results",
    "mix_commit",
    "mix_preview",
    "mix_verify",
    "norm_rotary",
    "packed_linear",
    "replay",
    "replay_layers",
    "resident_slots",
    "rms_norm",
    "route",
    "route_coreset",
    "router_linear",
    "shared_result",
    "shared_slots",
    "start_pass",
]

PROMPT_TILE_ROWS = 64
"""An expert has about so many rows of a prompt's chunk."""
PASS_ROWS = 64


def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`."""
    return packed.packed_linear(x, weight, workspace=_workspace(x.device))


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [M, K] times `weight` [N, K] float32 transposed, in float32: [M, N]."""
    if len(x) <= float32_linear.MOST_ROWS:
        return float32_linear.float32_linear(x, weight)
    return F.linear(x.float(), weight)


def route(router_logits: Tensor, *, top_k: int) -> SortedRouting:
    """`route`, sorted by expert: in one launch for a pass, in three for a prompt."""
    if len(router_logits) <= BLOCK_ROWS:
        return route_sorted(router_logits, top_k=top_k)
    return route_prompt_sorted(router_logits, top_k=top_k, tile_rows=PROMPT_TILE_ROWS)


def route_coreset(
    router_logits: Tensor, *, top_k: int, top_p: float
) -> tuple[SortedRouting, Tensor]:
    """`route_coreset`, sorted by expert."""
    routing = route_coreset_sorted(router_logits, top_k=top_k, top_p=top_p)
    assert routing.coreset is not None
    return routing, routing.coreset


def shared_result(x: Tensor, *, slots: ExpertSlots) -> Tensor:
    """The shared expert over rows [T, D]: [T, D] float32."""
    if len(x) <= PASS_ROWS:
        return shared_expert(x, slots=slots, every=_every_row(len(x), x.device))
    every = every_row(len(x), device=x.device, tile_rows=PROMPT_TILE_ROWS)
    return shared_expert(x, slots=slots, every=every)


def distinct_experts(expert_ids: Sequence[Tensor], num_experts: int) -> Tensor:
    """Experts that a pass uses, summed over its layers: a float64 scalar on the device."""
    counter = _counter(expert_ids[0].device)
    return distinct.distinct_experts(expert_ids, num_experts, counter=counter)


# These caches hold constants and scratch of a device, no state: launches of one stream use them in
# turn, and graphs need them at fixed addresses.


@cache
def _workspace(device: torch.device) -> packed.SplitWorkspace:
    """Room for the parts of any split product: only narrow weights are split, up to 64 rows."""
    return packed.split_workspace(
        packed.CONFIGS, rows=PASS_ROWS, features=packed.NARROW, device=device
    )


@cache
def _counter(device: torch.device) -> Tensor:
    """0 between two launches."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@cache
def _every_row(rows: int, device: torch.device) -> SortedRouting:
    return every_row(rows, device=device)
