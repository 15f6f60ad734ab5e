"""probs = softmax(router_logits); the A largest of a row; their (row, choice) pairs by expert.

Defined by `route` and `route_coreset` (the plain operators); the pairs and tiles are what the
grouped expert kernels read. Nothing here waits for the host, and no size depends on a value.

A pass or a commit of up to 64 rows is one program: 32 rows x 256 experts are 8,192 logits, too few
to share out, and a second launch would cost more than it saves. `route_prompt.py` has longer ones.

What is sorted are integers that hold a value and an index, so no two are equal: a stable sort, and
nothing travels along with the keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_float
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.route import Routing

BLOCK_ROWS = 64
"""A coreset is of at most so many rows; up to here routing is one launch."""
TILE_ROWS = 32
"""The most rows of a tile where the caller does not say."""

# Below the key of every number, -inf included.
NONE = tl.constexpr(-(1 << 31))
_KEY_OF_MINUS_INF = tl.constexpr(-0x7F800001)


@dataclass(frozen=True)
class RouteConfig:
    """Rows a program, and warps."""

    up_to_rows: int
    block_rows: int
    num_warps: int


CONFIGS = (
    # One row, as in `ar`: 4 logits a thread. With 4 warps the compiler spills on sm_90.
    RouteConfig(up_to_rows=1, block_rows=1, num_warps=2),
    # 16 logits a thread in each of some five arrays; what is left idle at 16 rows costs no time.
    RouteConfig(up_to_rows=BLOCK_ROWS, block_rows=32, num_warps=16),
)


@dataclass(frozen=True, eq=False)
class SortedRouting:
    """A routing, and its choices sorted by expert. Choice t * A + a is row t's a-th expert."""

    routing: Routing
    coreset: Tensor | None  # [E] bool
    order: Tensor  # [T * A] int32: choices by expert, rising among equals; those of none last
    tiles: Tensor  # [most tiles, 4] int32: expert, first place in `order`, rows, 0; rest zeros
    tile_count: Tensor  # [1] int32
    tile_rows: int = TILE_ROWS  # the most rows of a tile

    @property
    def expert_ids(self) -> Tensor:
        """[T, A] int64, -1 where a row uses fewer than A experts."""
        return self.routing.expert_ids

    @property
    def weights(self) -> Tensor:
        """[T, A] float32, each row sums to 1."""
        return self.routing.weights


@triton.jit
def _key(x):
    """float32 to int32 in the same order: zeros equal, NaN above all, nothing as low as NONE."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The number of a key; -inf for none."""
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == NONE, float("-inf"), x)


@triton.jit
def load_keys(logits, t, rows, row_stride, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Keys [T, E] of the rows `t` [T]; none outside."""
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (t[:, None] < rows) & (e < E)
    x = tl.load(logits + t[:, None].to(tl.int64) * row_stride + e, mask=inside, other=0.0)
    return tl.where(inside, _key(x.to(tl.float32)), NONE)


@triton.jit
def largest_of(keys, A: tl.constexpr, BLOCK_A: tl.constexpr):
    """Each row's A largest keys: ids, logits (both [T, A], falling), and the keys that are left."""
    e = tl.arange(0, keys.shape[1])[None, :]
    a = tl.arange(0, BLOCK_A)[None, :]
    ids = tl.full([keys.shape[0], BLOCK_A], 0, tl.int32)
    best = tl.full([keys.shape[0], BLOCK_A], NONE, tl.int32)
    for choice in range(A):
        largest = tl.max(keys, axis=1)[:, None]
        # A lower index wins a tie.
        winner = tl.min(tl.where(keys == largest, e, keys.shape[1] - 1), axis=1)[:, None]
        ids = tl.where(a == choice, winner, ids)
        best = tl.where(a == choice, largest, best)
        keys = tl.where(e == winner, NONE, keys)
    return ids, _logit(best), keys


@triton.jit
def weights_of(best):
    """softmax over the chosen logits [T, A]: their probabilities divided by their sum."""
    shares = tl.exp(best - tl.max(best, axis=1)[:, None])
    return shares / tl.sum(shares, axis=1)[:, None]


@triton.jit
def _totals(keys, left):
    """Each expert's probability [E] over the rows that chose it: those it is not in `left` of."""
    x = _logit(keys)
    chosen = (keys != NONE) & (left == NONE)
    top = tl.max(x, axis=1)[:, None]
    top = tl.where(top == float("-inf"), 0.0, top)  # a row that is not there
    shares = tl.exp(x - top)
    total = tl.sum(shares, axis=1)[:, None]
    probs = shares / tl.where(total == 0, 1.0, total)
    return tl.sum(tl.where(chosen, probs, 0.0), axis=0)


@triton.jit
def _coreset(totals, TOP_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """The coreset [E] from the totals [E]."""
    e = tl.arange(0, BLOCK_E)
    rank = (totals.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (BLOCK_E - 1 - e)
    ranked = tl.sort(rank, descending=True)
    # Masses are integers: their sums are exact in any order, none rounds up to the whole early.
    mass = (ranked >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    mass = (mass * 72057594037927936.0).to(tl.int64)  # 2^56; 64 rows of at most 1 fit
    before = tl.cumsum(mass, 0) - mass
    share = before.to(tl.float64) / tl.sum(mass, axis=0).to(tl.float64)
    kept = (share < tl.full([], TOP_P, tl.float64)) | (e == 0)
    least = tl.min(tl.where(kept, ranked, (1 << 63) - 1), axis=0)
    return (rank >= least) & (totals > 0)


@triton.jit
def store_tiles(tiles, tile_count, tiles_of, MAX_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The count, and zeros behind the last tile."""
    count = tl.sum(tiles_of, axis=0)
    tl.store(tile_count, count)
    tile = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, 4)[None, :]
    unused = (tile >= count) & (tile < MAX_TILES) & (column < 4)
    tl.store(tiles + tile * 4 + column, tl.zeros([BLOCK, 4], tl.int32), mask=unused)


@triton.jit
def store_tile(tiles, n, start, first, k, TILE_ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Every expert's k-th tile, where it has one; `n` rows, `start` and `first` tile [E]."""
    e = tl.arange(0, BLOCK_E)[:, None]
    column = tl.arange(0, 4)[None, :]
    done = k * TILE_ROWS
    left = n[:, None] - done
    size = tl.minimum(left, TILE_ROWS)
    value = tl.where(column == 1, start[:, None] + done, tl.where(column == 2, size, 0))
    value = tl.where(column == 0, e, value)
    tl.store(tiles + (first[:, None] + k) * 4 + column, value, mask=left > 0)


@triton.jit(do_not_specialize=["rows", "row_stride"])
def route_block_kernel(
    logits,
    expert_ids,
    weights,
    totals,
    coreset,
    order,
    tiles,
    tile_count,
    rows,
    row_stride,
    E: tl.constexpr,
    A: tl.constexpr,
    TOP_P: tl.constexpr,
    HAS_CORESET: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MAX_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """All of a block's routing in one program, BLOCK_T rows at a time."""
    if HAS_CORESET:
        sums = tl.zeros([BLOCK_E], tl.float32)
        for first_row in range(0, rows, BLOCK_T):
            t = first_row + tl.arange(0, BLOCK_T)
            keys = load_keys(logits, t, rows, row_stride, E, BLOCK_E)
            ids, best, left = largest_of(keys, A, BLOCK_A)
            sums += _totals(keys, left)
        # What went through memory lies one to a thread again; as a sum over rows every warp has
        # all of it, and the sort would be done eight times over.
        e = tl.arange(0, BLOCK_E)
        tl.store(totals + e, sums, mask=e < E)
        tl.debug_barrier()
        kept = _coreset(tl.load(totals + e, mask=e < E, other=0.0), TOP_P, BLOCK_E)
        tl.store(coreset + e, kept, mask=e < E)
    for first_row in range(0, rows, BLOCK_T):
        t = first_row + tl.arange(0, BLOCK_T)
        keys = load_keys(logits, t, rows, row_stride, E, BLOCK_E)
        if HAS_CORESET:
            keys = tl.where(kept[None, :], keys, tl.minimum(keys, _KEY_OF_MINUS_INF))
        ids, best, left = largest_of(keys, A, BLOCK_A)
        shares = weights_of(best)
        if HAS_CORESET:
            ids = tl.where(shares == 0, -1, ids)
        a = tl.arange(0, BLOCK_A)[None, :]
        inside = (t[:, None] < rows) & (a < A)
        choice = t[:, None] * A + a
        tl.store(expert_ids + choice, ids.to(tl.int64), mask=inside)
        tl.store(weights + choice, shares, mask=inside)

    # Choices of no expert behind all experts, places that are no choices behind those.
    tl.debug_barrier()
    places = tl.arange(0, CHOICES)
    expert = tl.load(expert_ids + places, mask=places < rows * A, other=BLOCK_E + 1).to(tl.int32)
    expert = tl.where(expert < 0, BLOCK_E, expert)
    i = tl.sort(expert * CHOICES + places) % CHOICES
    tl.store(order + places, i, mask=places < rows * A)

    n = tl.histogram(tl.minimum(expert, BLOCK_E - 1), BLOCK_E, mask=expert < BLOCK_E)
    tiles_of = tl.cdiv(n, TILE_ROWS)
    start = tl.cumsum(n, 0) - n
    first = tl.cumsum(tiles_of, 0) - tiles_of
    store_tiles(tiles, tile_count, tiles_of, MAX_TILES, BLOCK_TILES)
    for k in range(0, tl.max(tiles_of, axis=0)):
        store_tile(tiles, n, start, first, k, TILE_ROWS, BLOCK_E)


def route_sorted(
    router_logits: Tensor,
    *,
    top_k: int,
    tile_rows: int = TILE_ROWS,
    config: RouteConfig | None = None,
) -> SortedRouting:
    """`route`, sorted by expert.

    Args:
        router_logits: [T, E], last stride 1.
        top_k: A, at most E.
        tile_rows: the most rows of a tile; an expert's last tile has those that are left.
        config: one of `CONFIGS`; by the number of rows if not given.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or more than 64 rows.
    """
    return _route_block(router_logits, top_k=top_k, top_p=None, tile_rows=tile_rows, config=config)


def route_coreset_sorted(
    router_logits: Tensor,
    *,
    top_k: int,
    top_p: float,
    tile_rows: int = TILE_ROWS,
    config: RouteConfig | None = None,
) -> SortedRouting:
    """`route_coreset`, sorted by expert; arguments as in `route_sorted`, `top_p` beside them.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or more than 64 rows.
    """
    return _route_block(router_logits, top_k=top_k, top_p=top_p, tile_rows=tile_rows, config=config)


def most_tiles(choices: int, experts: int, tile_rows: int) -> int:
    """What sum(ceil(n / tile_rows)) over experts with n choices each cannot pass."""
    return min(choices, experts) + choices // tile_rows


def check_logits(router_logits: Tensor, *, top_k: int, tile_rows: int) -> None:
    """Refuses what the kernels cannot read."""
    if router_logits.dim() != 2 or 0 in router_logits.shape:
        raise ValueError(f"router logits are {list(router_logits.shape)}, not [T, E]")
    check_float("router_logits", router_logits)
    if router_logits.stride(1) != 1:
        raise ValueError(f"router logits have a last stride of {router_logits.stride(1)}, not 1")
    if not 1 <= top_k <= router_logits.shape[1]:
        raise ValueError(f"top_k is {top_k}, there are {router_logits.shape[1]} experts")
    if tile_rows < 1:
        raise ValueError(f"tile_rows is {tile_rows}, at least 1 is needed")


def empty_routing(
    router_logits: Tensor, *, top_k: int, tile_rows: int, coreset: bool
) -> SortedRouting:
    """Room for a routing of these logits."""
    (rows, experts), device = router_logits.shape, router_logits.device
    choices = rows * top_k
    routing = Routing(
        torch.empty(rows, top_k, dtype=torch.int64, device=device),
        torch.empty(rows, top_k, dtype=torch.float32, device=device),
    )
    most = most_tiles(choices, experts, tile_rows)
    return SortedRouting(
        routing,
        torch.empty(experts, dtype=torch.bool, device=device) if coreset else None,
        torch.empty(choices, dtype=torch.int32, device=device),
        torch.empty(most, 4, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        tile_rows,
    )


def _route_block(
    router_logits: Tensor,
    *,
    top_k: int,
    top_p: float | None,
    tile_rows: int,
    config: RouteConfig | None,
) -> SortedRouting:
    check_logits(router_logits, top_k=top_k, tile_rows=tile_rows)
    rows, experts = router_logits.shape
    if rows > BLOCK_ROWS:
        raise ValueError(f"{rows} rows, at most {BLOCK_ROWS} in a block")
    config = config or next(config for config in CONFIGS if rows <= config.up_to_rows)
    out = empty_routing(router_logits, top_k=top_k, tile_rows=tile_rows, coreset=top_p is not None)
    totals = torch.empty(experts, dtype=torch.float32, device=router_logits.device)
    route_block_kernel[(1,)](
        logits=router_logits,
        expert_ids=out.routing.expert_ids,
        weights=out.routing.weights,
        totals=totals,
        coreset=out.coreset,
        order=out.order,
        tiles=out.tiles,
        tile_count=out.tile_count,
        rows=rows,
        row_stride=router_logits.stride(0),
        E=experts,
        A=top_k,
        TOP_P=0.0 if top_p is None else top_p,
        HAS_CORESET=top_p is not None,
        TILE_ROWS=tile_rows,
        MAX_TILES=len(out.tiles),
        BLOCK_T=config.block_rows,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_A=triton.next_power_of_2(top_k),
        CHOICES=triton.next_power_of_2(rows * top_k),
        BLOCK_TILES=triton.next_power_of_2(len(out.tiles)),
        num_warps=config.num_warps,
    )
    return out


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's router: 256 experts, 8 a row."""
    types = {"logits": "*fp32", "expert_ids": "*i64", "weights": "*fp32", "coreset": "*i1"}
    types |= {"totals": "*fp32", "order": "*i32", "tiles": "*i32", "tile_count": "*i32"}
    types |= {"rows": "i32", "row_stride": "i32"}
    cases = []
    for name, rows, config, coreset in (
        ("commit of 1", 1, CONFIGS[0], False),
        ("commit of 32", 32, CONFIGS[1], False),
        ("preview of 32", 32, CONFIGS[1], True),
        ("preview of 64", 64, CONFIGS[1], True),
    ):
        most = most_tiles(rows * 8, 256, TILE_ROWS)
        constants: dict[str, float] = {"TOP_P": 0.9, "HAS_CORESET": coreset, "CHOICES": rows * 8}
        constants |= {"E": 256, "A": 8, "TILE_ROWS": TILE_ROWS, "MAX_TILES": most}
        constants |= {"BLOCK_T": config.block_rows, "BLOCK_E": 256, "BLOCK_A": 8}
        constants |= {"BLOCK_TILES": triton.next_power_of_2(most)}
        cases.append(
            GateCase(
                name=f"route {name}",
                fn=route_block_kernel,
                signature=types,
                constexprs=constants,
                num_warps=config.num_warps,
                num_stages=1,
            )
        )
    return tuple(cases)
