"""y = silu(sum_j in[t + j] taps[j] [+ sum_d qkv[t + d] right_taps[d - 1]]); q and k of unit length.

in = [conv_state | qkv]. One launch does what a GDN layer does between its input projection and its
mixer: convolution, SiLU, the l2 norm of the query and key heads, and the gates g = rate *
softplus(a + dt_bias) and beta = sigmoid(b). Defined by `causal_conv` and `block_conv` (the plain
operators), `l2_norm` and `GatedDeltaNet`.

T rows, J taps, C = 2 H_k Dk + H_v Dv channels: H_k query heads, H_k key heads, H_v value heads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gated_delta_commit import DeltaRecord, HeadShape
from clover_local.kernels.gpu.check import check_dense, check_rows
from clover_local.kernels.gpu.delta.steps import keep_last_rows, softplus
from clover_local.kernels.gpu.gate import GateCase

L2_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True)
class ConvConfig:
    """Rows a program, and warps."""

    up_to_rows: int
    block_rows: int
    num_warps: int


CONFIGS = (
    # A pass: 64 heads x 4 tiles of 8 rows are 256 programs, enough for 70 multiprocessors.
    ConvConfig(up_to_rows=64, block_rows=8, num_warps=4),
    # A prompt: fewer programs, each reads the three rows before its tile again.
    ConvConfig(up_to_rows=1 << 31, block_rows=32, num_warps=8),
)


@dataclass(frozen=True, eq=False)
class Gates:
    """What g and beta are made of."""

    a: Tensor  # [T, H_v], dtype of the rows; its own may be apart
    b: Tensor  # [T, H_v], as `a`
    rate: Tensor  # [H_v] float32, -exp(A_log)
    dt_bias: Tensor  # [H_v] float32


@dataclass(frozen=True, eq=False)
class Mixed:
    """What a mixer takes; all float32."""

    q: Tensor  # [T, H_k, Dk], unit length; q, k and v are views of one [T, C]
    k: Tensor  # [T, H_k, Dk], unit length
    v: Tensor  # [T, H_v, Dv]
    g: Tensor  # [T, H_v]
    beta: Tensor  # [T, H_v]


@triton.jit(do_not_specialize=["rows"])
def gated_delta_conv_kernel(
    qkv,
    conv_state,
    taps,
    right_taps,
    a,
    b,
    rate,
    dt_bias,
    counted,
    y,
    g,
    beta,
    new_conv_state,
    kept_inputs,
    rows,
    row_stride,
    a_stride,
    b_stride,
    H_K: tl.constexpr,
    H_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    WRITES_STATE: tl.constexpr,
    KEEPS_INPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Program (part, tile): one head of q, k or v over BLOCK_T rows."""
    channels: tl.constexpr = 2 * H_K * DK + H_V * DV
    part = tl.program_id(0)
    tile = tl.program_id(1)
    is_key = part < 2 * H_K
    first = tl.where(is_key, part * DK, 2 * H_K * DK + (part - 2 * H_K) * DV)
    width = tl.where(is_key, DK, DV)
    d = tl.arange(0, BLOCK_D)
    in_head = d < width
    column = first + d
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)

    acc = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for j in tl.static_range(LEFT):
        source = t + (j - (LEFT - 1))
        new = (source >= 0) & (source < rows)
        old = (source < 0) & (source >= 1 - LEFT)
        x = tl.load(
            qkv + source.to(tl.int64)[:, None] * row_stride + column[None, :],
            mask=new[:, None] & in_head[None, :],
            other=0.0,
        ).to(tl.float32)
        x += tl.load(
            conv_state + (source + (LEFT - 1))[:, None] * channels + column[None, :],
            mask=old[:, None] & in_head[None, :],
            other=0.0,
        )
        tap = tl.load(taps + j * channels + column, mask=in_head, other=0.0)
        acc += x * tap[None, :]
        if KEEPS_INPUTS and j == LEFT - 1:  # the rows themselves
            tl.store(
                kept_inputs + t.to(tl.int64)[:, None] * channels + column[None, :],
                x.to(kept_inputs.dtype.element_ty),
                mask=new[:, None] & in_head[None, :],
            )
    for i in tl.static_range(RIGHT):
        source = t + (i + 1)
        x = tl.load(
            qkv + source.to(tl.int64)[:, None] * row_stride + column[None, :],
            mask=(source < rows)[:, None] & in_head[None, :],
            other=0.0,
        ).to(tl.float32)
        tap = tl.load(right_taps + i * channels + column, mask=in_head, other=0.0)
        acc += x * tap[None, :]

    out = acc * tl.sigmoid(acc)
    square = tl.sum(tl.where(in_head[None, :], out * out, 0.0), axis=1)
    scale = tl.where(is_key, tl.rsqrt(square + L2_EPS), 1.0)
    tl.store(
        y + t.to(tl.int64)[:, None] * channels + column[None, :],
        out * scale[:, None],
        mask=(t < rows)[:, None] & in_head[None, :],
    )

    if part >= 2 * H_K:
        head = part - 2 * H_K
        row = t.to(tl.int64)
        inside = t < rows
        step = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(dt_bias + head)) * tl.load(rate + head)
        write = tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32)
        tl.store(g + row * H_V + head, step, mask=inside)
        tl.store(beta + row * H_V + head, tl.sigmoid(write), mask=inside)

    if WRITES_STATE:
        end = rows
        if HAS_COUNT:
            end = tl.load(counted)
        if tile == 0:
            keep_last_rows(
                qkv,
                row_stride,
                conv_state,
                new_conv_state,
                end,
                column,
                in_head,
                channels,
                LEFT,
                BLOCK_J,
            )


def commit_conv(
    qkv: Tensor,
    conv_state: Tensor,
    *,
    taps: Tensor,
    gates: Gates,
    heads: HeadShape,
    counted: Tensor | None = None,
    new_conv_state: Tensor | None = None,
    config: ConvConfig | None = None,
) -> tuple[Mixed, Tensor]:
    """The causal form.

    Args:
        qkv: [T, C], rows may be apart (a view of the projection's output); any float dtype.
        conv_state: [J - 1, C] float32, the rows before.
        taps: [J, C] float32.
        gates: what g and beta are made of.
        heads: how C divides.
        counted: one int32 on the device, how many rows count for the new state (0 to T, the first
            ones); all of them without it.
        new_conv_state: where the new state goes; may be `conv_state` itself.
        config: instead of the table's.

    Returns:
        What the delta rule takes, and the conv state after the counted rows.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    after = torch.empty_like(conv_state) if new_conv_state is None else new_conv_state
    check_dense("new conv state", after, shape=conv_state.shape, like=qkv)
    if counted is not None:
        check_dense("counted", counted, shape=(1,), like=qkv, dtype=torch.int32)
    mixed = _launch(
        qkv,
        conv_state,
        taps=taps,
        right_taps=None,
        gates=gates,
        heads=heads,
        counted=counted,
        after=after,
        record=None,
        config=config,
    )
    return mixed, after


def verify_conv(
    qkv: Tensor,
    conv_state: Tensor,
    *,
    taps: Tensor,
    gates: Gates,
    into: DeltaRecord,
    config: ConvConfig | None = None,
) -> Mixed:
    """The causal form, of rows that may not count: writes a record in place of a state.

    Arguments as in `commit_conv`; `into` gets the rows, and what the delta rule takes, of which the
    result are views.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    return _launch(
        qkv,
        conv_state,
        taps=taps,
        right_taps=None,
        gates=gates,
        heads=into.heads,
        counted=None,
        after=None,
        record=into,
        config=config,
    )


def preview_conv(
    qkv: Tensor,
    conv_state: Tensor,
    *,
    taps: Tensor,
    right_taps: Tensor,
    gates: Gates,
    heads: HeadShape,
    config: ConvConfig | None = None,
) -> Mixed:
    """The form of a block, which sees the rows behind as well; writes no state.

    Arguments as in `commit_conv`; `right_taps` [R, C] float32, tap d - 1 multiplies the row d
    positions later.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    check_dense("right taps", right_taps, shape=(len(right_taps), heads.channels), like=qkv)
    return _launch(
        qkv,
        conv_state,
        taps=taps,
        right_taps=right_taps,
        gates=gates,
        heads=heads,
        counted=None,
        after=None,
        record=None,
        config=config,
    )


def _launch(
    qkv: Tensor,
    conv_state: Tensor,
    *,
    taps: Tensor,
    right_taps: Tensor | None,
    gates: Gates,
    heads: HeadShape,
    counted: Tensor | None,
    after: Tensor | None,
    record: DeltaRecord | None,
    config: ConvConfig | None,
) -> Mixed:
    rows, left = len(qkv), len(taps)
    channels, value_heads = heads.channels, heads.value_heads
    config = config or next(c for c in CONFIGS if rows <= c.up_to_rows)
    # Only the first tile may read the old state, whose place the new one may take.
    if rows < 1 or not 2 <= left <= config.block_rows:
        raise ValueError(f"{rows} rows (1 at least), {left} taps (2 to {config.block_rows})")
    check_rows("qkv", qkv, shape=(rows, channels), like=qkv)
    check_rows("a", gates.a, shape=(rows, value_heads), like=qkv)
    check_rows("b", gates.b, shape=(rows, value_heads), like=qkv)
    check_dense("rate", gates.rate, shape=(value_heads,), like=qkv)
    check_dense("dt_bias", gates.dt_bias, shape=(value_heads,), like=qkv)
    check_dense("taps", taps, shape=(left, channels), like=qkv)
    check_dense("conv state", conv_state, shape=(left - 1, channels), like=qkv)
    if record is None:
        y = torch.empty(rows, channels, dtype=torch.float32, device=qkv.device)
        g = torch.empty(rows, value_heads, dtype=torch.float32, device=qkv.device)
        beta, kept = torch.empty_like(g), None
    else:
        y, g, beta, kept = record.mixed, record.g, record.beta, record.inputs
        check_dense("kept inputs", kept, shape=qkv.shape, like=qkv, dtype=qkv.dtype)
        check_dense("mixed", y, shape=qkv.shape, like=qkv)
        check_dense("g", g, shape=gates.a.shape, like=qkv)
        check_dense("beta", beta, shape=gates.a.shape, like=qkv)
    parts = 2 * heads.key_heads + value_heads
    gated_delta_conv_kernel[(parts, triton.cdiv(rows, config.block_rows))](
        qkv=qkv,
        conv_state=conv_state,
        taps=taps,
        right_taps=taps if right_taps is None else right_taps,  # not read with RIGHT = 0
        a=gates.a,
        b=gates.b,
        rate=gates.rate,
        dt_bias=gates.dt_bias,
        counted=counted,
        y=y,
        g=g,
        beta=beta,
        new_conv_state=after,
        kept_inputs=kept,
        rows=rows,
        row_stride=qkv.stride(0),
        a_stride=gates.a.stride(0),
        b_stride=gates.b.stride(0),
        H_K=heads.key_heads,
        H_V=value_heads,
        DK=heads.key_dim,
        DV=heads.value_dim,
        LEFT=left,
        RIGHT=0 if right_taps is None else len(right_taps),
        HAS_COUNT=counted is not None,
        WRITES_STATE=after is not None,
        KEEPS_INPUTS=kept is not None,
        BLOCK_T=config.block_rows,
        BLOCK_D=triton.next_power_of_2(max(heads.key_dim, heads.value_dim)),
        BLOCK_J=triton.next_power_of_2(left - 1),
        num_warps=config.num_warps,
    )
    keys = heads.key_heads * heads.key_dim
    q, k, v = torch.split(y, [keys, keys, channels - 2 * keys], dim=1)
    q, k = (x.view(rows, heads.key_heads, heads.key_dim) for x in (q, k))
    return Mixed(q=q, k=k, v=v.view(rows, value_heads, heads.value_dim), g=g, beta=beta)


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shapes: a commit, verify and preview of a block, and a prompt."""
    floats = ("conv_state", "taps", "right_taps", "rate", "dt_bias", "y", "g", "beta")
    types = dict.fromkeys((*floats, "new_conv_state"), "*fp32")
    types |= {"qkv": "*bf16", "kept_inputs": "*bf16", "a": "*bf16", "b": "*bf16", "counted": "*i32"}
    types |= dict.fromkeys(("rows", "row_stride", "a_stride", "b_stride"), "i32")
    shape = {"H_K": 16, "H_V": 32, "DK": 128, "DV": 128, "LEFT": 4, "BLOCK_D": 128, "BLOCK_J": 4}
    return tuple(
        GateCase(
            name=f"gated_delta_conv {name}",
            fn=gated_delta_conv_kernel,
            signature=types,
            constexprs=shape | state | {"RIGHT": right, "BLOCK_T": config.block_rows},
            num_warps=config.num_warps,
            num_stages=1,
        )
        for name, right, config, state in (
            ("commit", 0, CONFIGS[0], _flags(counts=True, writes=True)),
            ("verify", 0, CONFIGS[0], _flags(keeps=True)),
            ("preview", 3, CONFIGS[0], _flags()),
            ("prompt", 0, CONFIGS[1], _flags(writes=True)),
        )
    )


def _flags(*, counts: bool = False, writes: bool = False, keeps: bool = False) -> dict[str, bool]:
    return {"HAS_COUNT": counts, "WRITES_STATE": writes, "KEEPS_INPUTS": keeps}
