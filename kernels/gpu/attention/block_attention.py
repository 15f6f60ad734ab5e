"""o = softmax(q [K | k]^T / sqrt(Dh)) [V | v], times sigmoid(gate): a pass's rows, all or causal.

Defined by `block_attention` and `causal_attention`; K and V are the committed rows, whose number is
on the device, k and v the pass's own.

The heads that share a key head are rows of one product: T rows and G = H / H_kv are T G rows, so
K and V are read once for all of them. The committed rows are split into ranges of equal length, a
program each, since T G rows alone would fill few multiprocessors; the last range also takes the
pass's own rows. A second kernel puts the ranges together, in a fixed order.

T rows, H query and H_kv key heads of Dh dimensions; L committed rows in a buffer of N.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_rows, check_words
from clover_local.kernels.gpu.gate import GateCase

LOG2_E = 1.4426950408889634
COLUMNS = 64
"""Of a head, a program of the combining kernel: 64 programs for one row of the real model."""
COMBINE_WARPS = 4


@dataclass(frozen=True)
class Tile:
    """Products' rows (T G) and keys a step, warps and pipeline stages of a program."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionConfig:
    """For up to this many rows of products (T G): the tile, and ranges of the committed rows."""

    up_to_rows: int
    tile: Tile
    ranges: int


# Two programs a multiprocessor, with K and V of 32 keys on their way in each.
NARROW = Tile(block_rows=16, block_keys=32, num_warps=4, num_stages=2)
# 64 rows of 256 dimensions need 8 warps for their registers; 69,632 bytes, so one program a
# multiprocessor.
WIDE = Tile(block_rows=64, block_keys=32, num_warps=8, num_stages=2)
# Exact products, for tests and small models.
FLOAT32 = Tile(block_rows=16, block_keys=16, num_warps=8, num_stages=1)
CONFIGS = (
    AttentionConfig(16, NARROW, ranges=64),  # 1 or 2 rows: 2 key heads x 64 ranges
    AttentionConfig(64, WIDE, ranges=32),  # up to 8 rows: 2 x 32
    AttentionConfig(128, WIDE, ranges=16),  # 16 rows: 2 tiles x 2 x 16
    AttentionConfig(512, WIDE, ranges=8),  # 32 rows: 4 x 2 x 8; 64 rows: 8 x 2 x 8
    AttentionConfig(1 << 62, WIDE, ranges=1),  # a prompt's own rows are programs enough
)
CONFIGS_FLOAT32 = (AttentionConfig(1 << 62, FLOAT32, ranges=8),)


@triton.jit
def _attended(
    q,
    keys,
    values,
    key_row,
    value_row,
    start,
    end,
    last_seen,
    scale,
    top,
    total,
    acc,
    DH: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Rows start .. end - 1 of `keys` and `values` go into the running softmax of `q`; with CAUSAL,
    # a row of q takes only those up to its `last_seen`.
    d = tl.arange(0, acc.shape[1])
    in_head = d < DH
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < end
        row = n.to(tl.int64)[:, None]
        here = there[:, None] & in_head[None, :]
        k = tl.load(keys + row * key_row + d[None, :], mask=here, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        allowed = there[None, :]
        if CAUSAL:
            allowed = allowed & (n[None, :] <= last_seen[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key yet is at -inf; 0 in its place, or exp2 gets -inf + inf.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - level)
        p = tl.exp2(scores - level[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(values + row * value_row + d[None, :], mask=here, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["rows", "ranges"])
def range_kernel(
    q,
    k,
    v,
    cached_keys,
    cached_values,
    length,
    partial,
    levels,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    ranges,
    scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    DH: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (tile, key head, range): o over one range, and log2 of the softmax's denominator."""
    tile = tl.program_id(0)
    key_head = tl.program_id(1)
    part = tl.program_id(2)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // GROUP
    row = t.to(tl.int64)
    head = key_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    here = (t < rows)[:, None] & (d < DH)[None, :]
    x = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], here, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    committed = tl.load(length)
    each = tl.cdiv(tl.cdiv(committed, ranges), BLOCK_N) * BLOCK_N
    start = tl.minimum(part * each, committed)
    end = tl.minimum(start + each, committed)
    stride: tl.constexpr = H // GROUP * DH
    keys = cached_keys + key_head * DH
    values = cached_values + key_head * DH
    top, total, acc = _attended(
        x, keys, values, stride, stride, start, end, t, scale, top, total, acc, DH, False, BLOCK_N
    )
    own = tl.where(part == ranges - 1, rows, 0)
    if CAUSAL:
        own = tl.minimum(own, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    k += key_head * k_head
    v += key_head * v_head
    top, total, acc = _attended(
        x, k, v, k_row, v_row, 0, own, t, scale, top, total, acc, DH, CAUSAL, BLOCK_N
    )
    # An empty range leaves `partial` as it was; its level tells.
    some = total > 0.0
    at = (part * rows.to(tl.int64) + row) * H + head
    total = tl.where(some, total, 1.0)
    tl.store(levels + at, top + tl.log2(total), t < rows)  # -inf if empty
    tl.store(partial + at[:, None] * DH + d[None, :], acc / total[:, None], here & some[:, None])


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    partial,
    levels,
    gate,
    out,
    rows,
    gate_row,
    gate_head,
    H: tl.constexpr,
    DH: tl.constexpr,
    RANGES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, head, columns): the ranges by their weights, times sigmoid(gate)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    in_head = d < DH
    at = (r * rows.to(tl.int64) + t) * H + head
    level = tl.load(levels + at, mask=r < RANGES, other=float("-inf"))
    weight = tl.exp2(level - tl.max(level, axis=0))
    here = (weight > 0.0)[:, None] & in_head[None, :]
    x = tl.load(partial + at[:, None] * DH + d[None, :], mask=here, other=0.0)
    o = tl.sum(x * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    if HAS_GATE:
        z = tl.load(gate + t * gate_row + head * gate_head + d, mask=in_head, other=0.0)
        o *= tl.sigmoid(z.to(tl.float32))
    tl.store(out + (t * H + head) * DH + d, o.to(out.dtype.element_ty), mask=in_head)


def block_attention(
    q: Tensor,
    keys: Tensor,
    *,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    length: Tensor,
    gate: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Every row sees the committed rows and all of the block: [T, H, Dh], dtype of `q`.

    Args:
        q: [T, H, Dh]; rows and heads may be apart. So `keys`, `values` and `gate`; one dtype.
        keys: [T, H_kv, Dh], the block's own.
        values: as `keys`.
        cached_keys: [N, H_kv, Dh] contiguous, of which the first L count.
        cached_values: as `cached_keys`.
        length: L, one int32 on the device, 0 to N.
        gate: [T, H, Dh]; the result is multiplied by its sigmoid.
        config: instead of the table's.

    Raises:
        ValueError: a shape, dtype, stride, alignment or device does not fit.
    """
    return _launch(
        q,
        keys,
        values=values,
        cached_keys=cached_keys,
        cached_values=cached_values,
        length=length,
        gate=gate,
        config=config,
        is_causal=False,
    )


def causal_attention(
    q: Tensor,
    keys: Tensor,
    *,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    length: Tensor,
    gate: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Row t sees the committed rows and the new rows up to itself; else as `block_attention`.

    The new rows are read from `keys` and `values`, be they behind the committed ones yet or not.
    """
    return _launch(
        q,
        keys,
        values=values,
        cached_keys=cached_keys,
        cached_values=cached_values,
        length=length,
        gate=gate,
        config=config,
        is_causal=True,
    )


def _launch(
    q: Tensor,
    keys: Tensor,
    *,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    length: Tensor,
    gate: Tensor | None,
    config: AttentionConfig | None,
    is_causal: bool,
) -> Tensor:
    rows, heads, dh = q.shape
    key_heads = keys.shape[1]
    if rows < 1 or heads % key_heads:
        raise ValueError(f"{rows} rows, {heads} heads over {key_heads} key heads")
    check_rows("q", q, shape=(rows, heads, dh), like=q)
    if gate is not None:
        check_rows("gate", gate, shape=q.shape, like=q)
    cache = (len(cached_keys), key_heads, dh)
    for name, x, cached in (("keys", keys, cached_keys), ("values", values, cached_values)):
        check_rows(name, x, shape=(rows, key_heads, dh), like=q)
        check_dense(f"cached {name}", cached, shape=cache, like=q, dtype=q.dtype)
        check_words(f"cached {name}", cached)
    check_dense("length", length, shape=(1,), like=q, dtype=torch.int32)

    group = heads // key_heads
    table = CONFIGS_FLOAT32 if q.dtype == torch.float32 else CONFIGS
    config = config or next(c for c in table if rows * group <= c.up_to_rows)
    tile, tiles = config.tile, triton.cdiv(rows * group, config.tile.block_rows)
    partial = torch.empty(config.ranges, rows, heads, dh, dtype=torch.float32, device=q.device)
    levels = torch.empty(config.ranges, rows, heads, dtype=torch.float32, device=q.device)
    range_kernel[(tiles, key_heads, config.ranges)](
        q=q,
        k=keys,
        v=values,
        cached_keys=cached_keys,
        cached_values=cached_values,
        length=length,
        partial=partial,
        levels=levels,
        rows=rows,
        q_row=q.stride(0),
        q_head=q.stride(1),
        k_row=keys.stride(0),
        k_head=keys.stride(1),
        v_row=values.stride(0),
        v_head=values.stride(1),
        ranges=config.ranges,
        scale=dh**-0.5 * LOG2_E,
        H=heads,
        GROUP=group,
        DH=dh,
        CAUSAL=is_causal,
        BLOCK_M=tile.block_rows,
        BLOCK_N=tile.block_keys,
        BLOCK_D=max(16, triton.next_power_of_2(dh)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    combine_kernel[(rows, heads, triton.cdiv(dh, COLUMNS))](
        partial=partial,
        levels=levels,
        gate=gate,
        out=out,
        rows=rows,
        gate_row=0 if gate is None else gate.stride(0),
        gate_head=0 if gate is None else gate.stride(1),
        H=heads,
        DH=dh,
        RANGES=config.ranges,
        HAS_GATE=gate is not None,
        BLOCK_R=triton.next_power_of_2(config.ranges),
        BLOCK_D=COLUMNS,
        num_warps=COMBINE_WARPS,
        num_stages=1,
    )
    return out


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shapes: every tile, over all rows and causal, and the most ranges."""
    integers = ("rows", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "ranges")
    types = dict.fromkeys(integers, "i32") | dict.fromkeys(("partial", "levels"), "*fp32")
    types |= {"length": "*i32", "scale": "fp32"}
    shape = {"H": 16, "GROUP": 8, "DH": 256, "BLOCK_D": 256}
    rows = ("q", "k", "v", "cached_keys", "cached_values")
    ranges = tuple(
        GateCase(
            name=f"block_attention {name} {seen}",
            fn=range_kernel,
            signature=types | dict.fromkeys(rows, dtype),
            constexprs=shape
            | {"CAUSAL": seen == "causal", "BLOCK_M": tile.block_rows, "BLOCK_N": tile.block_keys},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            wants_cp_async=tile.num_stages > 1,
        )
        for name, tile, dtype in (
            ("narrow", NARROW, "*bf16"),
            ("wide", WIDE, "*bf16"),
            ("float16", NARROW, "*fp16"),
            ("float32", FLOAT32, "*fp32"),
        )
        for seen in ("all", "causal")
    )
    types = dict.fromkeys(("rows", "gate_row", "gate_head"), "i32") | {"gate": "*bf16"}
    types |= {"partial": "*fp32", "levels": "*fp32", "out": "*bf16"}
    most = max(config.ranges for config in CONFIGS)
    shape = {"H": 16, "DH": 256, "RANGES": most, "BLOCK_R": most, "BLOCK_D": COLUMNS}
    shape |= {"HAS_GATE": True}
    combine = GateCase(
        name="block_attention combine",
        fn=combine_kernel,
        signature=types,
        constexprs=shape,
        num_warps=COMBINE_WARPS,
        num_stages=1,
    )
    return (*ranges, combine)
