"""results[t, a] = weights[t, a] * down_e(hidden[place]): the second half of the grouped experts.

Defined by `expert_mlp`. `place` is that of choice (t, a) in `SortedRouting.order`, e its expert.
Every choice has its own place in float32: what is added, and in which order, is decided later.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_operand
from clover_local.kernels.gpu.experts.record import ExpertSlots, MatrixFormat
from clover_local.kernels.gpu.experts.row_tiles import (
    ExpertsConfig,
    check_experts,
    check_results,
    choose,
    gate_case,
    pieces_for,
)
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.route import SortedRouting
from clover_local.kernels.gpu.tiles import TRITON_TYPES, as_words, matrix_tile, row_words

# Not measured on a card yet: chosen by counting (registers, shared memory, bytes in flight).
CONFIGS = (
    # 32 programs a tile, each of only four steps: many small programs hide each other's start.
    ExpertsConfig(8, 3, block_n=64, piece=64, block_k=128, num_warps=4, num_stages=3),
    # A prompt. Products of 32 columns: with 64, some targets spill a few bytes.
    ExpertsConfig(64, 1, block_n=128, piece=32, block_k=64, num_warps=8, num_stages=3),
)


@triton.jit
def down_tile(
    words_ptr,
    scale_ptr,
    minimum_ptr,
    x_ptr,
    results_ptr,
    order_ptr,
    weights_ptr,
    first,
    rows,
    block,
    D,
    F,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_N features of a tile's rows; the pointers are those of its expert's matrix."""
    m = tl.arange(0, BLOCK_M)
    m_mask = m < rows
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = matrix_tile(
        words_ptr + n * row_words(F, BITS),
        scale_ptr + n * (F // GROUP),
        minimum_ptr + n * (F // GROUP),
        n < D,
        x_ptr,
        first + m,
        m_mask,
        F,
        0,
        F // (PIECE * PIECES),
        BITS,
        GROUP,
        PIECE,
        PIECES,
        MINIMUM,
        DTYPE,
        BLOCK_N,
        BLOCK_M,
    )
    choice = tl.load(order_ptr + first + m, mask=m_mask, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + choice, mask=m_mask, other=0.0)
    tl.store(
        results_ptr + choice[None, :] * D + n[:, None],
        acc * weights[None, :],
        mask=(n < D)[:, None] & m_mask[None, :],
    )


@triton.jit
def down_kernel(
    words_ptr,
    scale_ptr,
    minimum_ptr,
    x_ptr,
    results_ptr,
    slot_of_expert_ptr,
    tiles_ptr,
    tile_count_ptr,
    order_ptr,
    weights_ptr,
    record_words,
    record_scales,
    record_minima,
    down_words,
    down_scales,
    down_minima,
    D,
    F,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMALLEST_M: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Program (features, tile): the programs of one tile follow each other."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    if tile < tl.load(tile_count_ptr):
        slot = tl.load(slot_of_expert_ptr + tl.load(tiles_ptr + 4 * tile)).to(tl.int64)
        first = tl.load(tiles_ptr + 4 * tile + 1)
        rows = tl.load(tiles_ptr + 4 * tile + 2)
        for size in tl.static_range(SIZES):
            above = 0 if size == 0 else SMALLEST_M << (size - 1)
            if (slot >= 0) & (rows > above) & (rows <= SMALLEST_M << size):
                down_tile(
                    words_ptr + slot * record_words + down_words,
                    scale_ptr + slot * record_scales + down_scales,
                    minimum_ptr + slot * record_minima + down_minima,
                    x_ptr,
                    results_ptr,
                    order_ptr,
                    weights_ptr,
                    first,
                    rows,
                    block,
                    D,
                    F,
                    BITS,
                    GROUP,
                    PIECE,
                    PIECES,
                    MINIMUM,
                    DTYPE,
                    BLOCK_N,
                    SMALLEST_M << size,
                )


def expert_down(
    hidden: Tensor,
    routing: SortedRouting,
    *,
    experts: ExpertSlots,
    results: Tensor,
    config: ExpertsConfig | None = None,
) -> None:
    """Writes weights[t, a] * down(hidden) to `results` [T, A, D] float32.

    Places of experts that are in no slot stay as they are, so that waves of experts fill it one
    after the other. Other arguments as in `expert_results`.
    """
    layout = experts.layout
    rows, per_row = check_experts(hidden, routing, experts=experts, columns=layout.inner)
    if len(hidden) != rows * per_row:
        raise ValueError(f"hidden has {len(hidden)} rows, the routing {rows * per_row} choices")
    check_results(results, (rows, per_row, layout.hidden))
    check_operand("results", results, device=hidden.device)
    config = config or choose(CONFIGS, tile_rows=routing.tile_rows)
    matrix = layout.down
    pieces = pieces_for(matrix, config, columns=layout.inner)
    scale_bytes = matrix.scale_dtype.itemsize
    if not rows:
        return
    down_kernel[(triton.cdiv(layout.hidden, config.block_n), len(routing.tiles))](
        words_ptr=experts.records.view(torch.int32),
        scale_ptr=experts.records.view(matrix.scale_dtype),
        minimum_ptr=experts.records.view(torch.float32),
        x_ptr=as_words(hidden, bits=matrix.bits),
        results_ptr=results,
        slot_of_expert_ptr=experts.slot_of_expert,
        tiles_ptr=routing.tiles,
        tile_count_ptr=routing.tile_count,
        order_ptr=routing.order,
        weights_ptr=routing.routing.weights,
        record_words=layout.nbytes // 4,
        record_scales=layout.nbytes // scale_bytes,
        record_minima=layout.nbytes // 4,
        down_words=layout.down_packed // 4,
        down_scales=layout.down_scale // scale_bytes,
        down_minima=(layout.down_minimum or 0) // 4,
        D=layout.hidden,
        F=layout.inner,
        BITS=matrix.bits,
        GROUP=matrix.group_size,
        PIECE=pieces.columns,
        PIECES=pieces.count,
        MINIMUM=matrix.has_minimum,
        DTYPE=TRITON_TYPES[hidden.dtype],
        BLOCK_N=config.block_n,
        SMALLEST_M=config.smallest_m,
        SIZES=config.sizes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """Down of the real model; what compiles slowest is compiled in `gate_up.py` only."""
    block, prompt = CONFIGS
    bf16, f16 = torch.bfloat16, torch.float16
    chosen = (
        (block, MatrixFormat(4, 128, bf16, has_minimum=False), bf16),
        (block, MatrixFormat(8, 128, bf16, has_minimum=False), bf16),
        (prompt, MatrixFormat(4, 128, bf16, has_minimum=False), bf16),
        (prompt, MatrixFormat(4, 64, bf16, has_minimum=False), f16),
        (prompt, MatrixFormat(8, 128, bf16, has_minimum=False), bf16),
        (prompt, MatrixFormat(4, 32, bf16, has_minimum=True), bf16),
    )
    return tuple(
        gate_case(
            "expert_down",
            down_kernel,
            config,
            matrix=matrix,
            columns=512,
            constants={},
            dtype=dtype,
        )
        for config, matrix, dtype in chosen
    )
