"""o[t] = sum_s p[t, s] v[s] + p[t, B] exp(g[t]) S^T q[t] / sqrt(Dk); then the gated norm over o.

Defined by `block_softmax` followed by `gated_rms_norm`: p[t] is a softmax over the block's B rows
and one history slot. Reads the state and writes none. What comes before it, the convolution that
sees both sides, is `preview_conv`.

B rows, one block; shapes as in `gated_delta_commit`.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gated_delta_preview import DiffusionWeights
from clover_local.kernels.gpu.check import check_dense, check_heads, check_rows
from clover_local.kernels.gpu.gate import GateCase

MOST_ROWS = 64


@dataclass(frozen=True)
class PreviewConfig:
    """Rows a program, columns of q, k and rows of S a step, warps and pipeline stages."""

    block_rows: int
    step_keys: int
    num_warps: int
    num_stages: int


# 16 rows a program are 64 programs for 32 heads and 32 rows, about one for each of 70
# multiprocessors; a program reads all of its head's S, the second one from the cache.
CONFIG = PreviewConfig(block_rows=16, step_keys=32, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["size"])
def block_softmax_kernel(
    q,
    k,
    v,
    g,
    state,
    logit_scale,
    history_bias,
    history_c,
    z,
    weight,
    out,
    size,
    q_stride,
    k_stride,
    v_stride,
    z_stride,
    log_ratio,
    scale,
    eps,
    H_V: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (head, tile): BLOCK_T rows of one value head over all rows of the block."""
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    other = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_V)
    in_block = t < size
    is_other = other < size
    is_column = column < DV
    q += head // REPEATS * DK
    k += head // REPEATS * DK
    state += head * DK * DV

    scores = tl.zeros([BLOCK_T, BLOCK_S], dtype=tl.float32)
    read = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
    for start in range(0, DK, STEP):
        d = start + tl.arange(0, STEP)
        is_key = d < DK
        x = tl.load(
            q + t[:, None] * q_stride + d[None, :],
            mask=in_block[:, None] & is_key[None, :],
            other=0.0,
        )
        y = tl.load(
            k + other[:, None] * k_stride + d[None, :],
            mask=is_other[:, None] & is_key[None, :],
            other=0.0,
        )
        s = tl.load(
            state + d[:, None] * DV + column[None, :],
            mask=is_key[:, None] & is_column[None, :],
            other=0.0,
        )
        scores = tl.dot(x, tl.trans(y), scores, input_precision="tf32x3")
        read = tl.dot(x, s, read, input_precision="tf32x3")

    scores = tl.where(is_other[None, :], scores * tl.load(logit_scale + head), float("-inf"))
    history = tl.load(history_bias + head) + tl.load(history_c + head) * log_ratio
    highest = tl.maximum(tl.max(scores, axis=1), history)
    p = tl.exp(scores - highest[:, None])
    of_history = tl.exp(history - highest)
    total = tl.sum(p, axis=1) + of_history
    values = tl.load(
        v + other[:, None] * v_stride + head * DV + column[None, :],
        mask=is_other[:, None] & is_column[None, :],
        other=0.0,
    )
    decay = tl.exp(tl.load(g + t * H_V + head, mask=in_block, other=0.0))
    o = tl.dot(p, values, read * (of_history * decay * scale)[:, None], input_precision="tf32x3")
    o = o / total[:, None]

    square = tl.sum(tl.where(is_column[None, :], o * o, 0.0), axis=1)
    o = o * tl.rsqrt(square / DV + eps)[:, None]
    here = in_block[:, None] & is_column[None, :]
    at = head * DV + column[None, :]
    gate = tl.load(z + t[:, None] * z_stride + at, mask=here, other=0.0).to(tl.float32)
    o = o * tl.load(weight + column, mask=is_column, other=0.0)[None, :]
    o = o * gate * tl.sigmoid(gate)
    tl.store(out + t[:, None] * (H_V * DV) + at, o.to(out.dtype.element_ty), mask=here)


def normed_block_softmax(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    diffusion: DiffusionWeights,
    block_size: int,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
    config: PreviewConfig = CONFIG,
) -> Tensor:
    """One block's rows, normed and gated: [B, H_v, Dv], dtype of `z`.

    Args:
        q: [B, H_k, Dk] float32; rows may be apart, the heads of a row may not. So `k` and `v`.
        k: as `q`.
        v: [B, H_v, Dv].
        g: [B, H_v] float32.
        state: [H_v, Dk, Dv] float32, only read.
        diffusion: the scale of the logits and the history slot's numbers are read.
        block_size: the config's, whatever the B of this block.
        z: the gate, [B, H_v, Dv], any float dtype; rows may be apart.
        norm_weight: [Dv] float32.
        eps: of the norm.
        config: instead of the table's.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, or B is more than 64.
    """
    size, key_heads, dk = k.shape
    value_heads, _, dv = state.shape
    if not 1 <= size <= MOST_ROWS or value_heads % key_heads:
        raise ValueError(
            f"{size} rows, 1 to {MOST_ROWS} are possible; {value_heads} value heads over "
            f"{key_heads} key heads"
        )
    check_heads("q", q, shape=(size, key_heads, dk), like=k)
    check_heads("k", k, shape=(size, key_heads, dk), like=k)
    check_heads("v", v, shape=(size, value_heads, dv), like=k)
    check_rows("z", z.flatten(1), shape=(size, value_heads * dv), like=z)
    for name, x, shape in (
        ("g", g, (size, value_heads)),
        ("state", state, (value_heads, dk, dv)),
        ("logit scale", diffusion.logit_scale, (value_heads,)),
        ("history bias", diffusion.history_bias, (value_heads,)),
        ("history c", diffusion.history_c, (value_heads,)),
        ("norm weight", norm_weight, (dv,)),
    ):
        check_dense(name, x, shape=shape, like=k)
    out = torch.empty(size, value_heads, dv, dtype=z.dtype, device=z.device)
    block_softmax_kernel[(value_heads, triton.cdiv(size, config.block_rows))](
        q=q,
        k=k,
        v=v,
        g=g,
        state=state,
        logit_scale=diffusion.logit_scale,
        history_bias=diffusion.history_bias,
        history_c=diffusion.history_c,
        z=z,
        weight=norm_weight,
        out=out,
        size=size,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        z_stride=z.stride(0),
        log_ratio=math.log(size / block_size),
        scale=dk**-0.5,
        eps=eps,
        H_V=value_heads,
        REPEATS=value_heads // key_heads,
        DK=dk,
        DV=dv,
        BLOCK_T=config.block_rows,
        BLOCK_S=max(16, triton.next_power_of_2(size)),
        BLOCK_V=max(16, triton.next_power_of_2(dv)),
        STEP=config.step_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shapes: blocks of up to 16, 32 and 64 rows."""
    floats = ("q", "k", "v", "g", "state", "logit_scale", "history_bias", "history_c", "weight")
    integers = ("size", "q_stride", "k_stride", "v_stride", "z_stride")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "i32")
    types |= dict.fromkeys(("z", "out"), "*bf16")
    types |= dict.fromkeys(("log_ratio", "scale", "eps"), "fp32")
    shape = {"H_V": 32, "REPEATS": 2, "DK": 128, "DV": 128, "BLOCK_V": 128}
    shape |= {"BLOCK_T": CONFIG.block_rows, "STEP": CONFIG.step_keys}
    return tuple(
        GateCase(
            name=f"gated_delta_preview {rows} rows",
            fn=block_softmax_kernel,
            signature=types,
            constexprs=shape | {"BLOCK_S": rows},
            num_warps=CONFIG.num_warps,
            num_stages=CONFIG.num_stages,
            wants_cp_async=CONFIG.num_stages > 1,
        )
        for rows in (16, 32, 64)
    )
