"""hidden[place] = silu(gate_e(x[t])) * up_e(x[t]): the first half of the grouped experts.

Defined by `expert_mlp`. `place` is that of choice (t, a) in `SortedRouting.order`, e its expert.
Rows of gate and up are two halves of one product, so x is read once for both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.experts.record import ExpertSlots, MatrixFormat
from clover_local.kernels.gpu.experts.row_tiles import (
    ExpertsConfig,
    check_experts,
    choose,
    gate_case,
    pieces_for,
)
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.route import SortedRouting
from clover_local.kernels.gpu.tiles import TRITON_TYPES, as_words, matrix_tile, row_words

# Not measured on a card yet: chosen by counting (registers, shared memory, bytes in flight).
CONFIGS = (
    # A pass: 8 programs a tile, 560 for 70 experts. Two fit on a multiprocessor and keep 32 KB of
    # weights in flight; the card's bandwidth times its latency asks for 13 KB. Narrower programs
    # would read x, 2,048 columns of it, more often.
    ExpertsConfig(8, 3, block_n=128, piece=64, block_k=128, num_warps=8, num_stages=3),
    # A prompt: 2,048 rows are 64 for each expert; matrix instructions are the limit.
    ExpertsConfig(64, 1, block_n=128, piece=64, block_k=64, num_warps=8, num_stages=3),
)


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_up_tile(
    words_ptr,
    scale_ptr,
    minimum_ptr,
    x_ptr,
    y_ptr,
    order_ptr,
    first,
    rows,
    block,
    gate_words,
    up_words,
    gate_scales,
    up_scales,
    gate_minima,
    up_minima,
    D,
    F,
    A: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_N / 2 features of a tile's rows; the pointers are those of its expert's record."""
    m = tl.arange(0, BLOCK_M)
    m_mask = m < rows
    token = tl.load(order_ptr + first + m, mask=m_mask, other=0) // A
    # Rows of gate and up take turns, 8 at a time: a thread then holds both of a feature.
    n = tl.arange(0, BLOCK_N)
    is_up = (n // 8) % 2 == 1
    feature = block * (BLOCK_N // 2) + (n // 16) * 8 + n % 8
    acc = matrix_tile(
        words_ptr + (tl.where(is_up, up_words, gate_words) + feature * row_words(D, BITS)),
        scale_ptr + (tl.where(is_up, up_scales, gate_scales) + feature * (D // GROUP)),
        minimum_ptr + (tl.where(is_up, up_minima, gate_minima) + feature * (D // GROUP)),
        feature < F,
        x_ptr,
        token,
        m_mask,
        D,
        0,
        D // (PIECE * PIECES),
        BITS,
        GROUP,
        PIECE,
        PIECES,
        MINIMUM,
        DTYPE,
        BLOCK_N,
        BLOCK_M,
    )
    pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    hidden = tl.reshape(silu_mul(gate, up), [BLOCK_N // 2, BLOCK_M])
    f = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(
        y_ptr + (first + m).to(tl.int64)[None, :] * F + f[:, None],
        hidden.to(y_ptr.dtype.element_ty),
        mask=(f < F)[:, None] & m_mask[None, :],
    )


@triton.jit
def gate_up_kernel(
    words_ptr,
    scale_ptr,
    minimum_ptr,
    x_ptr,
    y_ptr,
    slot_of_expert_ptr,
    tiles_ptr,
    tile_count_ptr,
    order_ptr,
    record_words,
    record_scales,
    record_minima,
    gate_words,
    up_words,
    gate_scales,
    up_scales,
    gate_minima,
    up_minima,
    D,
    F,
    A: tl.constexpr,
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
                gate_up_tile(
                    words_ptr + slot * record_words,
                    scale_ptr + slot * record_scales,
                    minimum_ptr + slot * record_minima,
                    x_ptr,
                    y_ptr,
                    order_ptr,
                    first,
                    rows,
                    block,
                    gate_words,
                    up_words,
                    gate_scales,
                    up_scales,
                    gate_minima,
                    up_minima,
                    D,
                    F,
                    A,
                    BITS,
                    GROUP,
                    PIECE,
                    PIECES,
                    MINIMUM,
                    DTYPE,
                    BLOCK_N,
                    SMALLEST_M << size,
                )


def expert_gate_up(
    x: Tensor,
    routing: SortedRouting,
    *,
    experts: ExpertSlots,
    config: ExpertsConfig | None = None,
) -> Tensor:
    """silu(gate(x)) * up(x) of every choice in the order of `routing.order`: [T * A, F].

    Rows of experts that are in no slot stay as they are. Other arguments as in `expert_results`.
    """
    layout = experts.layout
    rows, per_row = check_experts(x, routing, experts=experts, columns=layout.hidden)
    if len(x) != rows:
        raise ValueError(f"x has {len(x)} rows, the routing {rows}")
    hidden = torch.empty(rows * per_row, layout.inner, dtype=x.dtype, device=x.device)
    config = config or choose(CONFIGS, tile_rows=routing.tile_rows)
    matrix = layout.gate_up
    pieces = pieces_for(matrix, config, columns=layout.hidden)
    scale_bytes = matrix.scale_dtype.itemsize
    if not rows:
        return hidden
    gate_up_kernel[(triton.cdiv(2 * layout.inner, config.block_n), len(routing.tiles))](
        words_ptr=experts.records.view(torch.int32),
        scale_ptr=experts.records.view(matrix.scale_dtype),
        minimum_ptr=experts.records.view(torch.float32),
        x_ptr=as_words(x, bits=matrix.bits),
        y_ptr=hidden,
        slot_of_expert_ptr=experts.slot_of_expert,
        tiles_ptr=routing.tiles,
        tile_count_ptr=routing.tile_count,
        order_ptr=routing.order,
        record_words=layout.nbytes // 4,
        record_scales=layout.nbytes // scale_bytes,
        record_minima=layout.nbytes // 4,
        gate_words=layout.gate_packed // 4,
        up_words=layout.up_packed // 4,
        gate_scales=layout.gate_scale // scale_bytes,
        up_scales=layout.up_scale // scale_bytes,
        gate_minima=(layout.gate_minimum or 0) // 4,
        up_minima=(layout.up_minimum or 0) // 4,
        D=layout.hidden,
        F=layout.inner,
        A=per_row,
        BITS=matrix.bits,
        GROUP=matrix.group_size,
        PIECE=pieces.columns,
        PIECES=pieces.count,
        MINIMUM=matrix.has_minimum,
        DTYPE=TRITON_TYPES[x.dtype],
        BLOCK_N=config.block_n,
        SMALLEST_M=config.smallest_m,
        SIZES=config.sizes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return hidden


def gate_cases() -> tuple[GateCase, ...]:
    """Gate and up of the real model; 8 bits are compiled in `down.py`, whose loop is the same."""
    block, prompt = CONFIGS
    bf16, f16 = torch.bfloat16, torch.float16
    chosen = (
        (block, MatrixFormat(4, 128, bf16, has_minimum=False), bf16),
        (block, MatrixFormat(4, 32, bf16, has_minimum=False), bf16),
        (block, MatrixFormat(4, 128, bf16, has_minimum=True), f16),
        (prompt, MatrixFormat(4, 128, bf16, has_minimum=False), bf16),
        (prompt, MatrixFormat(4, 64, bf16, has_minimum=False), f16),
        (prompt, MatrixFormat(4, 32, bf16, has_minimum=True), bf16),
    )
    return tuple(
        gate_case(
            "expert_gate_up",
            gate_up_kernel,
            config,
            matrix=matrix,
            columns=2048,
            constants={"A": 8},
            dtype=dtype,
        )
        for config, matrix, dtype in chosen
    )
