"""S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q / sqrt(Dk): row by row, per value head.

Defined by `gated_delta_recurrent`; for up to about 64 rows. A loop over rows with a few columns of
S a program: the columns do not know of each other, so nothing is exchanged and S is read and
written once.

T rows; q and k [T, H_k, Dk] with unit length, v [T, H_v, Dv], g and beta [T, H_v], S [H_v, Dk, Dv],
all float32. A key head serves H_v / H_k consecutive value heads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_heads
from clover_local.kernels.gpu.gate import GateCase


@dataclass(frozen=True)
class RecurrentConfig:
    """Columns of S a program, and warps."""

    block_values: int
    num_warps: int


# 8 columns are one 32-byte sector of a row of S, and 512 programs of one warp fill the card.
RECURRENT = RecurrentConfig(block_values=8, num_warps=1)


@triton.jit(do_not_specialize=["rows"])
def recurrent_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    counted,
    out,
    new_state,
    rows,
    q_stride,
    k_stride,
    v_stride,
    k_layer,
    v_layer,
    gate_layer,
    scale,
    H_V: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (head, columns, layer): BLOCK_V columns of one head's S through all rows."""
    head = tl.program_id(0)
    layer = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = key < DK
    is_column = column < DV
    k += layer * k_layer + head // REPEATS * DK + key
    v += layer * v_layer + head * DV + column
    if HAS_OUT:
        q += head // REPEATS * DK + key
        out += head * DV + column
    g += layer * gate_layer + head
    beta += layer * gate_layer + head
    here = layer * (H_V * DK * DV) + head * DK * DV + key[:, None] * DV + column[None, :]
    inside = is_key[:, None] & is_column[None, :]
    s = tl.load(state + here, mask=inside, other=0.0)
    end = rows
    if HAS_COUNT:
        end = tl.load(counted)

    # A row is loaded while the one before it is worked on: the loop waits for nothing else.
    some = end > 0
    k_next = tl.load(k, mask=is_key & some, other=0.0)
    v_next = tl.load(v, mask=is_column & some, other=0.0)
    g_next = tl.load(g, mask=some, other=0.0)
    beta_next = tl.load(beta, mask=some, other=0.0)
    q_next = k_next
    if HAS_OUT:
        q_next = tl.load(q, mask=is_key & some, other=0.0)
    for t in range(0, end):
        q_row, k_row, v_row = q_next, k_next, v_next
        decay, rate = tl.exp(g_next), beta_next
        k += k_stride
        v += v_stride
        g += H_V
        beta += H_V
        more = t + 1 < end
        k_next = tl.load(k, mask=is_key & more, other=0.0)
        v_next = tl.load(v, mask=is_column & more, other=0.0)
        g_next = tl.load(g, mask=more, other=0.0)
        beta_next = tl.load(beta, mask=more, other=0.0)
        if HAS_OUT:
            q += q_stride
            q_next = tl.load(q, mask=is_key & more, other=0.0)

        s = s * decay
        change = rate * (v_row - tl.sum(s * k_row[:, None], axis=0))
        s += k_row[:, None] * change[None, :]
        if HAS_OUT:
            tl.store(out, tl.sum(s * q_row[:, None], axis=0) * scale, mask=is_column)
            out += H_V * DV
    if HAS_OUT:
        for _ in range(end, rows):  # rows that do not count: zeros, not what memory held
            tl.store(out, tl.zeros([BLOCK_V], dtype=tl.float32), mask=is_column)
            out += H_V * DV
    if HAS_STATE:
        tl.store(new_state + here, s, mask=inside)


def gated_delta_recurrent(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    counted: Tensor | None = None,
    new_state: Tensor | None = None,
    config: RecurrentConfig = RECURRENT,
) -> tuple[Tensor, Tensor]:
    """As the reference of this name; for up to about 64 rows.

    Args:
        q: [T, H_k, Dk] float32; rows may be apart, the heads of a row may not. So `k` and `v`.
        k: as `q`.
        v: [T, H_v, Dv].
        g: [T, H_v].
        beta: [T, H_v].
        state: [H_v, Dk, Dv].
        counted: one int32 on the device, how many rows count (0 to T, the first ones): the others
            leave the state as it is and their outputs are zero. All rows count without it.
        new_state: where the new state goes; may be `state` itself.
        config: instead of the table's.

    Returns:
        o [T, H_v, Dv] and the state after the rows that count.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    after = torch.empty_like(state) if new_state is None else new_state
    out = _outputs(q, k, v=v)
    check_rule(k, v=v, g=g, beta=beta, state=state, after=after)
    if counted is not None:
        check_dense("counted", counted, shape=(1,), like=k, dtype=torch.int32)
    _launch(
        q,
        k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        state=state[None],
        counted=counted,
        out=out,
        new_state=after,
        config=config,
    )
    return out, after


def gated_delta_outputs(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    config: RecurrentConfig = RECURRENT,
) -> Tensor:
    """o of `gated_delta_recurrent` alone, bit for bit: of rows that may not count.

    Arguments and errors as there.
    """
    out = _outputs(q, k, v=v)
    check_rule(k, v=v, g=g, beta=beta, state=state, after=state)
    _launch(
        q,
        k[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        state=state[None],
        counted=None,
        out=out,
        new_state=None,
        config=config,
    )
    return out


def gated_delta_replay(
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    new_state: Tensor,
    config: RecurrentConfig = RECURRENT,
) -> None:
    """The state of `gated_delta_recurrent` alone, bit for bit: of L layers at once.

    A verifying pass keeps its k, v, g and beta; once it is known how many of its rows are accepted,
    they are replayed.

    Args:
        k: [L, T, H_k, Dk] float32; rows and layers may be apart, the heads of a row may not.
        v: [L, T, H_v, Dv], as `k`.
        g: [L, T, H_v]; layers may be apart.
        beta: as `g`, and as far apart.
        state: [L, H_v, Dk, Dv].
        new_state: where the new states go; may be `state` itself.
        config: instead of the table's.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    layers = len(state)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta), ("new state", new_state)):
        if len(x) != layers:
            raise ValueError(f"{name} is of {len(x)} layers, the state of {layers}")
    check_dense("state", state, shape=state.shape, like=k)
    check_dense("new state", new_state, shape=state.shape, like=k)
    if not layers:
        return
    if g.stride(0) != beta.stride(0):
        raise ValueError(f"layers of g are {g.stride(0)} apart, those of beta {beta.stride(0)}")
    check_rule(k[0], v=v[0], g=g[0], beta=beta[0], state=state[0], after=new_state[0])
    _launch(
        None,
        k,
        v=v,
        g=g,
        beta=beta,
        state=state,
        counted=None,
        out=None,
        new_state=new_state,
        config=config,
    )


def _outputs(q: Tensor, k: Tensor, *, v: Tensor) -> Tensor:
    check_heads("q", q, shape=k.shape, like=k)
    return torch.empty(v.shape, dtype=torch.float32, device=v.device)


def _launch(
    q: Tensor | None,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    counted: Tensor | None,
    out: Tensor | None,
    new_state: Tensor | None,
    config: RecurrentConfig,
) -> None:
    """All but q, counted and out have a dimension of layers in front; those are of one layer."""
    layers, value_heads, dk, dv = state.shape
    recurrent_kernel[(value_heads, triton.cdiv(dv, config.block_values), layers)](
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        state=state,
        counted=counted,
        out=out,
        new_state=new_state,
        rows=k.shape[1],
        q_stride=0 if q is None else q.stride(0),
        k_stride=k.stride(1),
        v_stride=v.stride(1),
        k_layer=k.stride(0),
        v_layer=v.stride(0),
        gate_layer=g.stride(0),
        scale=dk**-0.5,
        H_V=value_heads,
        REPEATS=value_heads // k.shape[2],
        DK=dk,
        DV=dv,
        HAS_COUNT=counted is not None,
        HAS_OUT=out is not None,
        HAS_STATE=new_state is not None,
        BLOCK_K=triton.next_power_of_2(dk),
        BLOCK_V=config.block_values,
        num_warps=config.num_warps,
    )


def check_rule(
    k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, after: Tensor
) -> None:
    """The tensors of either form fit together.

    Raises:
        ValueError: they do not.
    """
    rows, key_heads, dk = k.shape
    value_heads, _, dv = state.shape
    if rows < 1 or value_heads % key_heads:
        raise ValueError(f"{rows} rows, {value_heads} value heads over {key_heads} key heads")
    check_heads("k", k, shape=(rows, key_heads, dk), like=k)
    check_heads("v", v, shape=(rows, value_heads, dv), like=k)
    for name, x, shape in (
        ("g", g, (rows, value_heads)),
        ("beta", beta, (rows, value_heads)),
        ("state", state, (value_heads, dk, dv)),
        ("new state", after, (value_heads, dk, dv)),
    ):
        check_dense(name, x, shape=shape, like=k)


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shapes: a commit with rows counted on the device, a verify, a replay."""
    floats = ("q", "k", "v", "g", "beta", "state", "out", "new_state")
    integers = ("rows", "q_stride", "k_stride", "v_stride", "k_layer", "v_layer", "gate_layer")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "i32")
    types |= {"counted": "*i32", "scale": "fp32"}
    shape = {"H_V": 32, "REPEATS": 2, "DK": 128, "DV": 128, "BLOCK_K": 128}
    shape |= {"BLOCK_V": RECURRENT.block_values}
    return tuple(
        GateCase(
            name=f"gated_delta_commit {name}",
            fn=recurrent_kernel,
            signature=types,
            constexprs=shape | {"HAS_COUNT": counts, "HAS_OUT": has_out, "HAS_STATE": has_state},
            num_warps=RECURRENT.num_warps,
            num_stages=3,
        )
        for name, counts, has_out, has_state in (
            ("recurrent", True, True, True),
            ("outputs", False, True, False),
            ("replay", False, False, True),
        )
    )
