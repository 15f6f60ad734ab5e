"""y[M, N] = x[M, K] @ dequantize(weight[N, K]).T for a weight of 4 or 8 bits (W4A16, W8A16).

Defined by `packed_linear_reference`. A program makes BLOCK_N features of BLOCK_M rows. A linear map
of few rows costs what reading its weight costs: tiles are chosen so that enough bytes are on their
way (the card's 896 GB/s times its latency of about a microsecond are 13 KB for each of 70
multiprocessors).

A narrow weight has too few tiles to keep a card busy, so its columns are split too: each program
leaves its part in a workspace, and the last of a tile's programs to arrive adds the parts, always
in the same order. Which one that is cannot change a bit, and no second launch is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_float, check_operand
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.tiles import TRITON_TYPES, as_words, matrix_tile, row_words
from clover_local.kernels.int4 import BITS
from clover_local.kernels.packed import PackedWeight

SMALLEST_GROUP = 32
NARROW = 4096
WIDE = 65536
ANY = 1 << 31


@dataclass(frozen=True)
class LinearConfig:
    """How a product of up to some rows and features is cut; the first that fits is taken."""

    up_to_rows: int
    up_to_features: int
    block_n: int  # features of a tile
    block_m: int  # rows of a tile: 8 at least
    piece: int  # columns of a product, at most: fewer keep fewer registers busy with x
    block_k: int  # columns of a step
    splits: int  # programs that share a tile's columns
    num_warps: int
    num_stages: int
    with_minimum: bool = True  # whether a weight with minima may be multiplied so
    bits: tuple[int, ...] = BITS  # the widths of weights that may be


# Not measured on a card yet: chosen by counting (registers, shared memory, bytes in flight).
CONFIGS = (
    # A narrow weight has 32 tiles for 2,048 features: four programs a tile make 128.
    LinearConfig(8, NARROW, 64, 8, piece=128, block_k=128, splits=4, num_warps=4, num_stages=3),
    LinearConfig(8, ANY, 64, 8, piece=128, block_k=128, splits=1, num_warps=4, num_stages=3),
    # Pieces of 64 take about 20 registers less, but 8 bits spill with them on sm_89.
    LinearConfig(
        16, NARROW, 64, 16, piece=64, block_k=128, splits=4, num_warps=4, num_stages=3, bits=(4,)
    ),
    LinearConfig(
        16, ANY, 64, 16, piece=64, block_k=128, splits=1, num_warps=4, num_stages=3, bits=(4,)
    ),
    LinearConfig(
        16, NARROW, 64, 16, piece=128, block_k=128, splits=4, num_warps=4, num_stages=3, bits=(8,)
    ),
    LinearConfig(
        16, ANY, 64, 16, piece=128, block_k=128, splits=1, num_warps=4, num_stages=3, bits=(8,)
    ),
    LinearConfig(32, NARROW, 64, 32, piece=64, block_k=128, splits=4, num_warps=4, num_stages=3),
    LinearConfig(32, WIDE, 64, 32, piece=64, block_k=128, splits=1, num_warps=4, num_stages=3),
    # The vocabulary: x is read once for 128 features, else that took as much of L2 as the weight.
    LinearConfig(32, ANY, 128, 32, piece=64, block_k=128, splits=1, num_warps=8, num_stages=3),
    # Where groups are of 32 columns, a step of two products of 4 bits spills on sm_80.
    LinearConfig(
        64, NARROW, 128, 64, piece=64, block_k=32, splits=4, num_warps=8, num_stages=4, bits=(4,)
    ),
    LinearConfig(
        64, NARROW, 128, 64, piece=64, block_k=64, splits=4, num_warps=8, num_stages=4, bits=(8,)
    ),
    LinearConfig(64, ANY, 128, 64, piece=64, block_k=64, splits=1, num_warps=8, num_stages=4),
    # A prompt: matrix instructions are the limit, so each weight is unpacked for 128 rows. Minima
    # need a third accumulator, which does not fit beside two of this size.
    LinearConfig(
        ANY,
        ANY,
        128,
        128,
        piece=64,
        block_k=64,
        splits=1,
        num_warps=8,
        num_stages=3,
        with_minimum=False,
    ),
    LinearConfig(ANY, ANY, 128, 64, piece=64, block_k=64, splits=1, num_warps=8, num_stages=4),
)


@dataclass(frozen=True, eq=False)
class SplitWorkspace:
    """Where the programs that share a tile leave their parts; launches in turn may share it."""

    parts: Tensor  # float32
    arrived: Tensor  # int32, zero between launches


@dataclass(frozen=True)
class Pieces:
    """The columns of one product, and the products of one step."""

    columns: int
    count: int


@triton.jit(do_not_specialize=["M"])
def packed_linear_kernel(
    words_ptr,
    scale_ptr,
    minimum_ptr,
    x_ptr,
    y_ptr,
    parts_ptr,
    arrived_ptr,
    M,
    N,
    K,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (tile, split); tiles of the same features follow each other and share the weight."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tiles = tl.cdiv(M, BLOCK_M)
    n = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    steps = K // (PIECE * PIECES)
    per_split = tl.cdiv(steps, SPLITS)
    acc = matrix_tile(
        words_ptr + n.to(tl.int64) * row_words(K, BITS),
        scale_ptr + n.to(tl.int64) * (K // GROUP),
        minimum_ptr + n.to(tl.int64) * (K // GROUP),
        n < N,
        x_ptr,
        m,
        m < M,
        K,
        split * per_split,
        tl.minimum(steps, (split + 1) * per_split),
        BITS,
        GROUP,
        PIECE,
        PIECES,
        MINIMUM,
        DTYPE,
        BLOCK_N,
        BLOCK_M,
    )
    y_ptrs = y_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    y_mask = (n < N)[:, None] & (m < M)[None, :]
    if SPLITS == 1:
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=y_mask)
    else:
        tiles = tl.num_programs(0)
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts_ptrs = parts_ptr + tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + within
        stride = tiles.to(tl.int64) * (BLOCK_N * BLOCK_M)
        # The workspace holds whole tiles, so nothing needs a mask but y.
        tl.store(parts_ptrs + split * stride, acc)
        tl.debug_barrier()  # all of the part is written before this program counts as arrived
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(parts_ptrs + other * stride, cache_modifier=".cg")
            tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=y_mask)
            tl.store(arrived_ptr + tile, 0)


def choose(*, bits: int, rows: int, features: int, minimum: bool) -> LinearConfig:
    """The first configuration of the table that fits."""
    return next(
        config
        for config in CONFIGS
        if bits in config.bits
        and rows <= config.up_to_rows
        and features <= config.up_to_features
        and (config.with_minimum or not minimum)
    )


def pieces_of(group_size: int, *, columns: int, piece: int, block_k: int) -> Pieces:
    """How the columns of a weight are cut: a piece never straddles two groups.

    Raises:
        ValueError: the groups are no multiple of 32.
    """
    if group_size % SMALLEST_GROUP:
        raise ValueError(f"groups of {group_size} columns are no multiple of {SMALLEST_GROUP}")
    piece = min(piece, group_size & -group_size)
    count = max(1, block_k // piece)
    while columns % (piece * count):
        count //= 2
    return Pieces(piece, count)


def tiles_of(config: LinearConfig, *, rows: int, features: int) -> int:
    """Tiles of a product."""
    return -(-rows // config.block_m) * -(-features // config.block_n)


def split_workspace(
    configs: Sequence[LinearConfig], *, rows: int, features: int, device: torch.device | str
) -> SplitWorkspace:
    """A workspace for any product of up to `rows` rows and `features` features."""
    elements = tiles = 0
    for config in configs:
        if config.splits > 1:
            count = tiles_of(
                config,
                rows=min(rows, config.up_to_rows),
                features=min(features, config.up_to_features),
            )
            tiles = max(tiles, count)
            elements = max(elements, count * config.splits * config.block_n * config.block_m)
    return SplitWorkspace(
        torch.empty(elements, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    config: LinearConfig | None = None,
    workspace: SplitWorkspace | None = None,
) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`.

    Args:
        x: bfloat16, float16 or float32; contiguous, its start a multiple of 16 bytes.
        weight: groups a multiple of 32; contiguous parts, aligned like x.
        config: one of `CONFIGS`; by the weight and the shape if not given.
        workspace: from `split_workspace`, to be used by launches in turn; without one a launch that
            splits columns makes its own.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    (n, k), bits = weight.shape, weight.bits
    if config is not None and bits not in config.bits:
        raise ValueError(f"the weight has {bits} bits, the configuration is for {config.bits}")
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x is {tuple(x.shape)}, the weight {(n, k)}")
    check_float("x", x)
    check_operand("x", x, device=x.device)
    check_operand("weight.data", weight.data, device=x.device)
    check_operand("weight.scale", weight.scale, device=x.device)
    if weight.minimum is not None:
        check_operand("weight.minimum", weight.minimum, device=x.device)
    rows = len(x)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    config = config or choose(bits=bits, rows=rows, features=n, minimum=weight.minimum is not None)
    pieces = pieces_of(weight.group_size, columns=k, piece=config.piece, block_k=config.block_k)
    tiles = tiles_of(config, rows=rows, features=n)
    parts, arrived = y, y  # never touched where nothing is split
    if config.splits > 1:
        workspace = workspace or split_workspace([config], rows=rows, features=n, device=x.device)
        parts, arrived = workspace.parts, workspace.arrived
        elements = tiles * config.splits * config.block_n * config.block_m
        if len(parts) < elements or len(arrived) < tiles:
            raise ValueError(
                f"the workspace holds {len(parts)} numbers of {len(arrived)} tiles, "
                f"{elements} of {tiles} are needed"
            )
        check_operand("workspace.parts", parts, device=x.device)
        check_operand("workspace.arrived", arrived, device=x.device)
    packed_linear_kernel[(tiles, config.splits)](
        words_ptr=weight.data,
        scale_ptr=weight.scale,
        minimum_ptr=weight.scale if weight.minimum is None else weight.minimum,
        x_ptr=as_words(x, bits=bits),
        y_ptr=y,
        parts_ptr=parts,
        arrived_ptr=arrived,
        M=rows,
        N=n,
        K=k,
        BITS=bits,
        GROUP=weight.group_size,
        PIECE=pieces.columns,
        PIECES=pieces.count,
        MINIMUM=weight.minimum is not None,
        DTYPE=TRITON_TYPES[x.dtype],
        BLOCK_N=config.block_n,
        BLOCK_M=config.block_m,
        SPLITS=config.splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def gate_cases() -> tuple[GateCase, ...]:
    """Every configuration in groups of 128, and other formats where they take most registers."""
    every = [_gate_case(c, bits=bits, group_size=128) for c in CONFIGS for bits in c.bits]
    others = (
        (4, 2048, NARROW, 64, False, torch.bfloat16),
        (4, 32, NARROW, 32, False, torch.bfloat16),
        (4, 64, NARROW, 32, False, torch.bfloat16),
        (4, 2048, NARROW, 32, False, torch.bfloat16),
        (4, 1, NARROW, 32, True, torch.bfloat16),
        (4, 32, 248320, 32, True, torch.bfloat16),
        (4, 2048, NARROW, 32, True, torch.bfloat16),
        (4, 32, NARROW, 128, True, torch.float16),
        (4, 2048, NARROW, 128, False, torch.float16),
        (8, 64, NARROW, 32, True, torch.bfloat16),
        (8, 2048, NARROW, 32, False, torch.bfloat16),
        (8, 2048, NARROW, 128, True, torch.float16),
    )
    chosen = [
        _gate_case(
            choose(bits=bits, rows=rows, features=features, minimum=minimum),
            bits=bits,
            group_size=group_size,
            minimum=minimum,
            dtype=dtype,
        )
        for bits, rows, features, group_size, minimum, dtype in others
    ]
    return (*every, *chosen)


def _gate_case(
    config: LinearConfig,
    *,
    bits: int,
    group_size: int,
    minimum: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> GateCase:
    """One configuration with rows of 16-bit floats over a weight of the real model."""
    pieces = pieces_of(group_size, columns=2048, piece=config.piece, block_k=config.block_k)
    signature = {
        "words_ptr": "*i32",
        "scale_ptr": "*bf16",
        "minimum_ptr": "*fp32" if minimum else "*bf16",
        "x_ptr": "*i64" if bits == 4 else "*i32",
        "y_ptr": f"*{TRITON_TYPES[dtype]}",
        "parts_ptr": "*fp32",
        "arrived_ptr": "*i32",
        "M": "i32",
        "N": "i32",
        "K": "i32",
    }
    constexprs = {
        "BITS": bits,
        "GROUP": group_size,
        "PIECE": pieces.columns,
        "PIECES": pieces.count,
        "MINIMUM": minimum,
        "DTYPE": TRITON_TYPES[dtype],
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "SPLITS": config.splits,
    }
    rows = "any" if config.up_to_rows == ANY else config.up_to_rows
    tile = f"{config.block_n}x{config.block_m}/{config.splits}"
    return GateCase(
        name=(
            f"int{bits}_linear M {rows} {tile} g{group_size}"
            + " min" * minimum
            + " f16" * (dtype == torch.float16)
        ),
        fn=packed_linear_kernel,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        wants_cp_async=True,
    )
