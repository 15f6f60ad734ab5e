"""y[t] = sum_a weights[t, a] * down_e(silu(gate_e(x[t])) * up_e(x[t])), e = expert_ids[t, a].

Defined by `expert_mlp`. Experts are packed records in slots (`record.py`), of 4 or 8 bits;
gate and up may have other bits than down. Three launches:

    expert_gate_up   hidden[place] = silu(gate(x[t])) * up(x[t])     place of (t, a) by expert
    expert_down      results[t, a] = weights[t, a] * down(hidden[place])               float32
    add_results      y[t] = results[t, 0] + results[t, 1] + ...     float32, in routing order

`results` has a place for every choice and is added in routing order: which experts were in slots,
and in how many waves they came, cannot change a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_operand
from clover_local.kernels.gpu.experts.down import expert_down
from clover_local.kernels.gpu.experts.gate_up import expert_gate_up
from clover_local.kernels.gpu.experts.record import ExpertSlots
from clover_local.kernels.gpu.experts.row_tiles import check_results
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.route import TILE_ROWS, SortedRouting

ADD_COLUMNS = 1024
ADD_WARPS = 4


@triton.jit
def add_kernel(results_ptr, expert_ids_ptr, y_ptr, D, A: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (row, columns): one choice after the other; choices of no expert are left out."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(A):
        place = row * A + choice
        used = tl.load(expert_ids_ptr + place) >= 0
        total += tl.load(results_ptr + place * D + d, mask=(d < D) & used, other=0.0)
    tl.store(y_ptr + row * D + d, total, mask=d < D)


def int4_experts(
    x: Tensor, routing: SortedRouting, *, experts: ExpertSlots, tile_rows: int = TILE_ROWS
) -> Tensor:
    """All of `expert_mlp`: [T, D] float32. Every expert that a row uses has to be in a slot.

    Args:
        x: [T, D], contiguous.
        routing: of these rows.
        experts: the layer's.
        tile_rows: the most rows of a tile of `routing`: what it was made with.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    rows, per_row = routing.routing.expert_ids.shape
    hidden = expert_gate_up(x, routing, experts=experts, tile_rows=tile_rows)
    results = torch.empty(
        rows, per_row, experts.layout.hidden, dtype=torch.float32, device=x.device
    )
    expert_down(hidden, routing, experts=experts, results=results, tile_rows=tile_rows)
    return add_results(results, routing)


def add_results(results: Tensor, routing: SortedRouting) -> Tensor:
    """The sum of `results` [T, A, D] over A in routing order, without choices of no expert.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    expert_ids = routing.routing.expert_ids
    rows, per_row = expert_ids.shape
    columns = results.shape[-1]
    check_results(results, (rows, per_row, columns))
    check_operand("results", results, device=results.device)
    check_operand("expert_ids", expert_ids, device=results.device)
    y = torch.empty(rows, columns, dtype=torch.float32, device=results.device)
    if rows:
        add_kernel[(rows, triton.cdiv(columns, ADD_COLUMNS))](
            results_ptr=results,
            expert_ids_ptr=expert_ids,
            y_ptr=y,
            D=columns,
            A=per_row,
            BLOCK_D=ADD_COLUMNS,
            num_warps=ADD_WARPS,
        )
    return y


def gate_cases() -> tuple[GateCase, ...]:
    """The sum over eight choices."""
    types = {"results_ptr": "*fp32", "expert_ids_ptr": "*i64", "y_ptr": "*fp32", "D": "i32"}
    constexprs = {"A": 8, "BLOCK_D": ADD_COLUMNS}
    return (
        GateCase(
            name="expert_add",
            fn=add_kernel,
            signature=types | dict.fromkeys(constexprs, "constexpr"),
            constexprs=constexprs,
            num_warps=ADD_WARPS,
            num_stages=1,
        ),
    )
