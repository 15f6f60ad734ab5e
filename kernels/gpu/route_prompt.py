"""The routing of a prompt: as `route.py`, for any number of rows, in three launches.

Rows choose, and count how often each expert is chosen (`route_rows_kernel`); one program adds the
counts up and lists the tiles (`place_experts_kernel`); rows put their choices behind those of the
rows before (`place_choices_kernel`). Nothing waits for the host. A prompt has no coreset.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.route import (
    NONE,
    TILE_ROWS,
    RouteConfig,
    SortedRouting,
    check_logits,
    empty_routing,
    largest_of,
    load_keys,
    most_tiles,
    store_tile,
    store_tiles,
    weights_of,
)

# 2,048 rows are 128 programs of 32 logits a thread.
CONFIG = RouteConfig(up_to_rows=1 << 31, block_rows=16, num_warps=4)
# One program, whatever the prompt: 16 counts of each expert at a time.
PLACE_ROWS, PLACE_WARPS = 16, 8


@triton.jit(do_not_specialize=["rows", "row_stride"])
def route_rows_kernel(
    logits,
    expert_ids,
    weights,
    counts,
    rows,
    row_stride,
    E: tl.constexpr,
    A: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """One tile of a prompt's rows: their choices, and how often each expert is chosen."""
    program = tl.program_id(0)
    t = program * BLOCK_T + tl.arange(0, BLOCK_T)
    keys = load_keys(logits, t, rows, row_stride, E, BLOCK_E)
    ids, best, left = largest_of(keys, A, BLOCK_A)
    a = tl.arange(0, BLOCK_A)[None, :]
    inside = (t[:, None] < rows) & (a < A)
    choice = t[:, None].to(tl.int64) * A + a
    tl.store(expert_ids + choice, ids.to(tl.int64), mask=inside)
    tl.store(weights + choice, weights_of(best), mask=inside)
    e = tl.arange(0, BLOCK_E)
    n = tl.sum(((keys != NONE) & (left == NONE)).to(tl.int32), axis=0)
    tl.store(counts + program.to(tl.int64) * E + e, n, mask=e < E)


@triton.jit(do_not_specialize=["row_tiles"])
def place_experts_kernel(
    counts,
    starts,
    tiles,
    tile_count,
    row_tiles,
    E: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MAX_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Counts [row tiles, E] to counts of the row tiles before; starts [E] in `order`; tiles."""
    e = tl.arange(0, BLOCK_E)
    n = tl.zeros([BLOCK_E], tl.int32)
    for first_row in range(0, row_tiles, BLOCK_R):
        r = first_row + tl.arange(0, BLOCK_R)
        at = counts + r[:, None].to(tl.int64) * E + e[None, :]
        inside = (r[:, None] < row_tiles) & (e[None, :] < E)
        here = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(here, 0) - here + n[None, :], mask=inside)
        n += tl.sum(here, axis=0)
    start = tl.cumsum(n, 0) - n
    tl.store(starts + e, start, mask=e < E)
    tiles_of = tl.cdiv(n, TILE_ROWS)
    first = tl.cumsum(tiles_of, 0) - tiles_of
    store_tiles(tiles, tile_count, tiles_of, MAX_TILES, BLOCK_TILES)
    for k in range(0, tl.max(tiles_of, axis=0)):
        store_tile(tiles, n, start, first, k, TILE_ROWS, BLOCK_E)


@triton.jit(do_not_specialize=["rows"])
def place_choices_kernel(
    expert_ids,
    counts,
    starts,
    order,
    rows,
    E: tl.constexpr,
    A: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """One tile of rows puts its choices in place, behind those of the row tiles before."""
    program = tl.program_id(0)
    CHOICES: tl.constexpr = BLOCK_T * BLOCK_A
    i = tl.arange(0, CHOICES)
    t = program * BLOCK_T + i // BLOCK_A
    inside = (t < rows) & (i % BLOCK_A < A)
    choice = t * A + i % BLOCK_A
    expert = tl.load(expert_ids + choice, mask=inside, other=E).to(tl.int32)
    earlier = (expert[None, :] == expert[:, None]) & (i[None, :] < i[:, None])
    place = tl.sum(earlier.to(tl.int32), axis=1)
    place += tl.load(starts + expert, mask=inside, other=0)
    place += tl.load(counts + program.to(tl.int64) * E + expert, mask=inside, other=0)
    tl.store(order + place, choice, mask=inside)


def route_prompt_sorted(
    router_logits: Tensor,
    *,
    top_k: int,
    tile_rows: int = TILE_ROWS,
    config: RouteConfig = CONFIG,
) -> SortedRouting:
    """`route` of any number of rows, sorted by expert; arguments as in `route.route_sorted`.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    check_logits(router_logits, top_k=top_k, tile_rows=tile_rows)
    (rows, experts), device = router_logits.shape, router_logits.device
    out = empty_routing(router_logits, top_k=top_k, tile_rows=tile_rows, coreset=False)
    row_tiles = triton.cdiv(rows, config.block_rows)
    counts = torch.empty(row_tiles, experts, dtype=torch.int32, device=device)
    starts = torch.empty(experts, dtype=torch.int32, device=device)
    block_e, block_a = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    route_rows_kernel[(row_tiles,)](
        logits=router_logits,
        expert_ids=out.routing.expert_ids,
        weights=out.routing.weights,
        counts=counts,
        rows=rows,
        row_stride=router_logits.stride(0),
        E=experts,
        A=top_k,
        BLOCK_T=config.block_rows,
        BLOCK_E=block_e,
        BLOCK_A=block_a,
        num_warps=config.num_warps,
    )
    place_experts_kernel[(1,)](
        counts=counts,
        starts=starts,
        tiles=out.tiles,
        tile_count=out.tile_count,
        row_tiles=row_tiles,
        E=experts,
        TILE_ROWS=tile_rows,
        MAX_TILES=len(out.tiles),
        BLOCK_R=PLACE_ROWS,
        BLOCK_E=block_e,
        BLOCK_TILES=triton.next_power_of_2(len(out.tiles)),
        num_warps=PLACE_WARPS,
    )
    place_choices_kernel[(row_tiles,)](
        expert_ids=out.routing.expert_ids,
        counts=counts,
        starts=starts,
        order=out.order,
        rows=rows,
        E=experts,
        A=top_k,
        BLOCK_T=config.block_rows,
        BLOCK_A=block_a,
        num_warps=config.num_warps,
    )
    return out


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's router, and a prompt of 2,048 rows."""
    types = {"logits": "*fp32", "expert_ids": "*i64", "weights": "*fp32"}
    types |= dict.fromkeys(("order", "tiles", "tile_count", "counts", "starts"), "*i32")
    types |= dict.fromkeys(("rows", "row_stride", "row_tiles"), "i32")
    most = most_tiles(2048 * 8, 256, TILE_ROWS)
    shape = {"E": 256, "A": 8, "BLOCK_T": CONFIG.block_rows, "BLOCK_A": 8}
    place = {"E": 256, "TILE_ROWS": TILE_ROWS, "MAX_TILES": most, "BLOCK_R": PLACE_ROWS}
    place |= {"BLOCK_E": 256, "BLOCK_TILES": triton.next_power_of_2(most)}
    cases: tuple[tuple[str, Any, dict[str, int], int], ...] = (
        ("rows", route_rows_kernel, shape | {"BLOCK_E": 256}, CONFIG.num_warps),
        ("experts", place_experts_kernel, place, PLACE_WARPS),
        ("choices", place_choices_kernel, shape, CONFIG.num_warps),
    )
    return tuple(
        GateCase(
            name=f"route prompt: {name}",
            fn=fn,
            signature={arg: types[arg] for arg in fn.arg_names if arg in types},
            constexprs=constants,
            num_warps=warps,
            num_stages=1,
        )
        for name, fn, constants, warps in cases
    )
