"""sum = x + (results[:, 0] + results[:, 1] + ... + shared * sigmoid(shared_gate)), and norm(sum).

Defined by `add_rms_norm` and `MixedExperts` (the plain operators). All in float32, rounded where
those round: the update, its sum with the hidden states, the norm. Places are added in routing
order, and those of no expert are not read, so neither where experts lie nor what an earlier pass
left in `results` can change a bit.

A program has one row: of eight places and 2,048 columns it reads 64 KB, from a cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu import norms
from clover_local.kernels.gpu.check import check_dense, check_float, check_rows
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.residual import MixedExperts

WARPS = 16
"""2,048 columns are 4 a thread, one load of 16 bytes for each place. ptxas keeps about four such
loads of a thread under way, whatever their width, so fewer threads would wait more often."""


@triton.jit
def add_experts_norm_kernel(
    x,
    results,
    expert_ids,
    shared,
    shared_gate,
    weight,
    total,
    normed,
    x_stride,
    shared_stride,
    gate_stride,
    eps,
    P: tl.constexpr,
    HAS_IDS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row: its experts' results, its sum with them, the norm of that."""
    row = tl.program_id(0).to(tl.int64)
    dtype = total.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    update = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(P):
        place = row * P + choice
        wanted = inside
        if HAS_IDS:
            wanted = inside & (tl.load(expert_ids + place) >= 0)
        update += tl.load(results + place * D + d, mask=wanted, other=0.0)
    gate = tl.sigmoid(tl.load(shared_gate + row * gate_stride))
    update += (
        tl.load(shared + row * shared_stride + d, mask=inside, other=0.0).to(tl.float32) * gate
    )
    wide = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    rounded = (wide + update.to(dtype).to(tl.float32)).to(dtype)
    tl.store(total + row * D + d, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    gain = 1.0 + tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * D + d, (wide * scale * gain).to(dtype), mask=inside)


def add_rms_norm(
    hidden_states: Tensor, update: Tensor | MixedExperts, *, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """hidden_states + update, and the zero-centred RMSNorm of that: both of one dtype.

    Args:
        hidden_states: [T, D], last stride 1; up to 4,096 columns.
        update: [T, D] of that dtype; or experts: results and ids contiguous, the rows of `shared`
            and `shared_gate` may lie apart.
        weight: [D] float32.
        eps: added to the mean square.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if isinstance(update, Tensor):
        return norms.add_rms_norm(hidden_states, update, weight=weight, eps=eps)
    _check(hidden_states, update, weight=weight)
    rows, columns = hidden_states.shape
    total = torch.empty(rows, columns, dtype=hidden_states.dtype, device=hidden_states.device)
    normed = torch.empty_like(total)
    add_experts_norm_kernel[(rows,)](
        x=hidden_states,
        results=update.results,
        expert_ids=update.expert_ids,
        shared=update.shared,
        shared_gate=update.shared_gate,
        weight=weight,
        total=total,
        normed=normed,
        x_stride=hidden_states.stride(0),
        shared_stride=update.shared.stride(0),
        gate_stride=update.shared_gate.stride(0),
        eps=eps,
        P=update.results.shape[1],
        HAS_IDS=update.expert_ids is not None,
        D=columns,
        BLOCK_D=triton.next_power_of_2(columns),
        num_warps=WARPS,
    )
    return total, normed


def _check(hidden_states: Tensor, update: MixedExperts, *, weight: Tensor) -> None:
    if hidden_states.dim() != 2 or 0 in hidden_states.shape:
        raise ValueError(f"hidden_states are {list(hidden_states.shape)}, not [T, D]")
    rows, columns = hidden_states.shape
    if columns > norms.WIDEST:
        raise ValueError(f"{columns} columns, from 1 to {norms.WIDEST} fit in a program")
    check_rows("hidden_states", hidden_states, shape=[rows, columns], like=hidden_states)
    results, expert_ids = update.results, update.expert_ids
    if results.dim() != 3 or results.shape[1] == 0:
        raise ValueError(f"results are {list(results.shape)}, not [T, P, D]")
    places = results.shape[1]
    check_dense("results", results, shape=[rows, places, columns], like=hidden_states)
    if expert_ids is not None:
        check_dense(
            "expert_ids", expert_ids, shape=[rows, places], like=hidden_states, dtype=torch.int64
        )
    check_float("shared", update.shared)
    check_rows("shared", update.shared, shape=[rows, columns], like=update.shared)
    if update.shared.device != hidden_states.device:
        raise ValueError(
            f"shared is on {update.shared.device}, the rows beside it on {hidden_states.device}"
        )
    # Each row's gate by itself is dense: a column of the router's logits will do.
    if update.shared_gate.shape != (rows, 1):
        raise ValueError(f"shared_gate is {list(update.shared_gate.shape)}, not {[rows, 1]}")
    check_dense("shared_gate", update.shared_gate[:1], shape=[1, 1], like=hidden_states)
    check_dense("weight", weight, shape=[columns], like=hidden_states)


def gate_cases() -> tuple[GateCase, ...]:
    """Rows of 2,048; eight places or one, some left out or none; the shared part of both kinds."""
    types = dict.fromkeys(("x", "total", "normed"), "*bf16") | {"expert_ids": "*i64"}
    types |= dict.fromkeys(("results", "shared_gate", "weight"), "*fp32") | {"eps": "fp32"}
    types |= dict.fromkeys(("x_stride", "shared_stride", "gate_stride"), "i32")
    none = {"expert_ids": None}
    cases = []
    for name, places, shared, absent in (
        ("add_experts_norm", 8, "*fp32", {}),
        ("add_experts_norm shared bf16", 8, "*bf16", {}),
        ("add_experts_norm all count", 1, "*fp32", none),
    ):
        constants = {"P": places, "HAS_IDS": not absent, "D": 2048, "BLOCK_D": 2048}
        kept = {argument: kind for argument, kind in types.items() if argument not in absent}
        cases.append(
            GateCase(
                name=name,
                fn=add_experts_norm_kernel,
                signature=kept | {"shared": shared},
                constexprs=constants | absent,
                num_warps=WARPS,
                num_stages=1,
            )
        )
    return tuple(cases)
