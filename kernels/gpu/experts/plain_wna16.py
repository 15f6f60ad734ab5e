"""y[t, a] = weight_e[N, K] x[t], e = expert_ids[t, a]: a straightforward wna16 loop, as a baseline.

What most projects' first grouped kernel looks like: rows are the wide side of the product and
padded to tiles of 16, every byte is loaded once for each of its two nibbles, the scale is loaded
for every weight, and weights are rounded to the rows' dtype. The bench runs it beside ours; nothing
else does. Defined by `packed_linear_reference`, a choice at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.experts.record import ExpertSlots
from clover_local.kernels.gpu.route import SortedRouting
from clover_local.kernels.gpu.tiles import TRITON_TYPES

BLOCK_M = 16
BLOCK_N = 64
BLOCK_K = 64
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit
def plain_wna16_kernel(
    bytes_ptr,
    scale_ptr,
    x_ptr,
    y_ptr,
    slot_of_expert_ptr,
    tiles_ptr,
    tile_count_ptr,
    order_ptr,
    record_bytes,
    record_scales,
    matrix_bytes,
    matrix_scales,
    N,
    K,
    A: tl.constexpr,
    X_BY_CHOICE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (features, tile, half of a tile of 32 rows)."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count_ptr):
        return
    slot = tl.load(slot_of_expert_ptr + tl.load(tiles_ptr + 4 * tile)).to(tl.int64)
    if slot < 0:
        return
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m < tl.load(tiles_ptr + 4 * tile + 2)
    place = tl.load(tiles_ptr + 4 * tile + 1) + m
    choice = tl.load(order_ptr + place, mask=m_mask, other=0).to(tl.int64)
    row = choice if X_BY_CHOICE else choice // A
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = k < K
        mask = k_mask[:, None] & n_mask[None, :]
        x = tl.load(
            x_ptr + row[:, None] * K + k[None, :],
            mask=m_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        column = k[:, None] * BITS // 8
        stored = tl.load(
            bytes_ptr + slot * record_bytes + matrix_bytes + n[None, :] * (K * BITS // 8) + column,
            mask=mask,
            other=0,
        )
        if BITS == 4:
            stored = (stored >> ((k[:, None] % 2) * 4).to(tl.uint8)) & 15
        scale = tl.load(
            scale_ptr
            + slot * record_scales
            + matrix_scales
            + n[None, :] * (K // GROUP)
            + k[:, None] // GROUP,
            mask=mask,
            other=0.0,
        )
        weight = (stored.to(tl.float32) - (1 << (BITS - 1))) * scale.to(tl.float32)
        acc = tl.dot(x, weight.to(DTYPE), acc, input_precision="ieee")
    tl.store(
        y_ptr + choice[:, None] * N + n[None, :],
        acc.to(DTYPE),
        mask=m_mask[:, None] & n_mask[None, :],
    )


def plain_wna16(
    x: Tensor,
    routing: SortedRouting,
    *,
    experts: ExpertSlots,
    matrix: str,
) -> Tensor:
    """One of an expert's matrices for every choice: [T * A, N], without minima.

    Args:
        x: [T, D] for `gate` and `up`, [T * A, F] by choice for `down`; contiguous.
        routing: of these rows, sorted by expert.
        experts: the layer's; places of experts without a slot stay as they are.
        matrix: `gate`, `up` or `down`.

    Raises:
        ValueError: another matrix, or shapes that do not fit.
    """
    layout = experts.layout
    choices = {
        "gate": (layout.gate_packed, layout.gate_scale, layout.gate_up),
        "up": (layout.up_packed, layout.up_scale, layout.gate_up),
        "down": (layout.down_packed, layout.down_scale, layout.down),
    }
    if matrix not in choices:
        raise ValueError(f"there is no matrix {matrix!r}, only {', '.join(choices)}")
    packed, scales, kind = choices[matrix]
    rows, per_row = routing.routing.expert_ids.shape
    down = matrix == "down"
    n, k = (layout.hidden, layout.inner) if down else (layout.inner, layout.hidden)
    if x.shape != (rows * per_row if down else rows, k):
        raise ValueError(f"x is {tuple(x.shape)}, {rows} rows of {per_row} choices and {k} columns")
    scale_bytes = kind.scale_dtype.itemsize
    y = torch.empty(rows * per_row, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, BLOCK_N), len(routing.tiles), triton.cdiv(routing.tile_rows, BLOCK_M))
    plain_wna16_kernel[grid](
        bytes_ptr=experts.records,
        scale_ptr=experts.records.view(kind.scale_dtype),
        x_ptr=x,
        y_ptr=y,
        slot_of_expert_ptr=experts.slot_of_expert,
        tiles_ptr=routing.tiles,
        tile_count_ptr=routing.tile_count,
        order_ptr=routing.order,
        record_bytes=layout.nbytes,
        record_scales=layout.nbytes // scale_bytes,
        matrix_bytes=packed,
        matrix_scales=scales // scale_bytes,
        N=n,
        K=k,
        A=per_row,
        X_BY_CHOICE=down,
        BITS=kind.bits,
        GROUP=kind.group_size,
        DTYPE=TRITON_TYPES[x.dtype],
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return y
