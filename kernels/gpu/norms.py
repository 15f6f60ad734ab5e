"""y = x / sqrt(mean(x^2) + eps) * (1 + weight); with the residual sum, the gate, or the rotation.

Defined by `rms_norm`, `gated_rms_norm` and `rotary` (the plain operators). Each is bound by memory
and by its launch, so what stands beside a norm in the model is done in the same launch:

- `add_rms_norm`: hidden_states + update, and the norm of that sum;
- `gated_rms_norm`: the norm of a GDN head times silu(gate);
- `norm_rotary`: the norms of all query and key heads of a pass, and their rotation.

All in float32, rounded where the plain operators round: the sum before its norm, the norm before
its rotation. A program has one row (or head) in registers and reads it once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_float, check_rows
from clover_local.kernels.gpu.gate import GateCase

WIDEST = 4096
"""A row has to fit in the registers of a program."""


@dataclass(frozen=True)
class NormConfig:
    """Warps of a program that has one row."""

    up_to_columns: int
    num_warps: int


CONFIGS = (
    # A head: 128 or 256 numbers are one or two loads of 16 bytes for the threads of one warp.
    NormConfig(up_to_columns=512, num_warps=1),
    # A row of hidden states: 2,048 numbers are 16 a thread.
    NormConfig(up_to_columns=WIDEST, num_warps=4),
)


@triton.jit
def _scale(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row padded with zeros."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)


@triton.jit
def rms_norm_kernel(
    x,
    update,
    weight,
    total,
    normed,
    x_stride,
    update_stride,
    eps,
    D: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A row's norm, or its sum with `update` and the norm of that."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    wide = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        wide += tl.load(update + row * update_stride + d, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * D + d, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    gain = 1.0 + tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    y = wide * _scale(wide, eps, D) * gain
    tl.store(normed + row * D + d, y.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gated_rms_norm_kernel(
    x,
    weight,
    gate,
    normed,
    x_stride,
    gate_row_stride,
    gate_head_stride,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one row; `x` has its heads one behind the other, `gate` need not."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    wide = tl.load(x + row * x_stride + head * D + d, mask=inside, other=0.0).to(tl.float32)
    at = gate + row * gate_row_stride + head * gate_head_stride + d
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    y = wide * _scale(wide, eps, D) * gain * (z * tl.sigmoid(z))
    tl.store(normed + (row * H + head) * D + d, y.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def norm_rotary_kernel(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One head of one row: query heads first, then key heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < H:
        source = q + row * q_row_stride + head.to(tl.int64) * q_head_stride
        weight = q_weight
        target = q_out + (row * H + head) * D
    else:
        source = k + row * k_row_stride + (head - H).to(tl.int64) * k_head_stride
        weight = k_weight
        target = k_out + (row * H_KV + head - H) * D
    dtype = q_out.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    x = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
    scale = _scale(x, eps, D)
    gain = 1.0 + tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(target + d, (x * scale * gain).to(dtype), mask=(d >= 2 * HALF) & (d < D))
    # Dimension i pairs with i + HALF: those are read again, from the first cache, to lie together.
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    first = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=inside, other=0.0).to(tl.float32)
    first_gain = 1.0 + tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    second_gain = 1.0 + tl.load(weight + HALF + i, mask=inside, other=0.0).to(tl.float32)
    first = (first * scale * first_gain).to(dtype).to(tl.float32)
    second = (second * scale * second_gain).to(dtype).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=inside, other=0.0)
    s = tl.load(sin + row * HALF + i, mask=inside, other=0.0)
    tl.store(target + i, (first * c - second * s).to(dtype), mask=inside)
    tl.store(target + HALF + i, (second * c + first * s).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, config: NormConfig | None = None) -> Tensor:
    """Zero-centred RMSNorm: `x` [..., D], `weight` [D] float32, to [..., D] of the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    rows = _rows("x", x)
    check_dense("weight", weight, shape=[x.shape[-1]], like=x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(rows, None, weight=weight, total=None, normed=normed, eps=eps, config=config)
    return normed


def add_rms_norm(
    hidden_states: Tensor,
    update: Tensor,
    *,
    weight: Tensor,
    eps: float,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden_states + update, and the zero-centred RMSNorm of that sum; all [..., D], one dtype.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    rows = _rows("hidden_states", hidden_states)
    check_rows("update", update, shape=hidden_states.shape, like=hidden_states)
    check_dense("weight", weight, shape=[hidden_states.shape[-1]], like=hidden_states)
    total = torch.empty(hidden_states.shape, dtype=rows.dtype, device=rows.device)
    normed = torch.empty_like(total)
    _launch_rms_norm(
        rows,
        _rows("update", update),
        weight=weight,
        total=total,
        normed=normed,
        eps=eps,
        config=config,
    )
    return total, normed


def gated_rms_norm(
    x: Tensor, weight: Tensor, *, gate: Tensor, eps: float, config: NormConfig | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), [T, H, D], of the dtype of `gate`.

    Args:
        x: [T, H, D], heads one behind the other; any float dtype.
        weight: [D] float32, plain (no 1 +).
        gate: [T, H, D]; rows and heads may lie apart.
        eps: added to the mean square.
        config: one of `CONFIGS`; by D if not given.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x is {list(x.shape)}, not [T, H, D]")
    (rows, heads, columns), config = x.shape, config or _config(x.shape[-1])
    if x.stride(2) != 1 or (heads > 1 and x.stride(1) != columns):
        raise ValueError(f"x has strides {x.stride()}, heads of {columns} numbers without gaps")
    check_rows("x", x, shape=x.shape, like=x)
    check_rows("gate", gate, shape=x.shape, like=gate)
    if gate.device != x.device:
        raise ValueError(f"gate is on {gate.device}, x on {x.device}")
    check_dense("weight", weight, shape=[columns], like=x)
    normed = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    gated_rms_norm_kernel[(rows, heads)](
        x=x,
        weight=weight,
        gate=gate,
        normed=normed,
        x_stride=x.stride(0),
        gate_row_stride=gate.stride(0),
        gate_head_stride=gate.stride(1),
        eps=eps,
        H=heads,
        D=columns,
        BLOCK_D=triton.next_power_of_2(columns),
        num_warps=config.num_warps,
    )
    return normed


def norm_rotary(
    q: Tensor,
    k: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, then `rotary`, of queries [T, H, D] and keys [T, H_kv, D]; contiguous results.

    Args:
        q: rows and heads may lie apart.
        k: of the same dtype; likewise.
        q_weight: [D] float32, zero-centred.
        k_weight: likewise.
        cos: [T, R / 2] float32; the first R dimensions of D rotate.
        sin: likewise.
        eps: added to the mean square.
        config: one of `CONFIGS`; by D if not given.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if q.dim() != 3 or 0 in q.shape or k.dim() != 3 or 0 in k.shape:
        raise ValueError(f"q is {list(q.shape)} and k {list(k.shape)}, not [T, H, D]")
    (rows, heads, columns), config = q.shape, config or _config(q.shape[-1])
    key_heads = k.shape[1]
    check_rows("q", q, shape=q.shape, like=q)
    check_rows("k", k, shape=[rows, key_heads, columns], like=q)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_dense(name, weight, shape=[columns], like=q)
    half = cos.shape[-1]
    if 2 * half > columns:
        raise ValueError(f"{2 * half} dimensions to rotate, heads have {columns}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_dense(name, angle, shape=[rows, half], like=q)
    out = [torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in (q, k)]
    norm_rotary_kernel[(rows, heads + key_heads)](
        q=q,
        k=k,
        q_weight=q_weight,
        k_weight=k_weight,
        cos=cos,
        sin=sin,
        q_out=out[0],
        k_out=out[1],
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        k_row_stride=k.stride(0),
        k_head_stride=k.stride(1),
        eps=eps,
        H=heads,
        H_KV=key_heads,
        D=columns,
        HALF=half,
        BLOCK_D=triton.next_power_of_2(columns),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=config.num_warps,
    )
    return out[0], out[1]


def _config(columns: int) -> NormConfig:
    if not 1 <= columns <= WIDEST:
        raise ValueError(f"{columns} columns, from 1 to {WIDEST} fit in a program")
    return next(config for config in CONFIGS if columns <= config.up_to_columns)


def _rows(name: str, x: Tensor) -> Tensor:
    """`x` [..., D] as [rows, D], without a copy."""
    check_float(name, x)
    if x.dim() == 0 or 0 in x.shape:
        raise ValueError(f"{name} is {list(x.shape)}, not [..., D]")
    if x.dim() != 2 and not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}, contiguous ones are needed")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has a last stride of {x.stride(-1)}, not 1")
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _launch_rms_norm(
    x: Tensor,
    update: Tensor | None,
    *,
    weight: Tensor,
    total: Tensor | None,
    normed: Tensor,
    eps: float,
    config: NormConfig | None,
) -> None:
    rows, columns = x.shape
    config = config or _config(columns)
    rms_norm_kernel[(rows,)](
        x=x,
        update=update,
        weight=weight,
        total=total,
        normed=normed,
        x_stride=x.stride(0),
        update_stride=0 if update is None else update.stride(0),
        eps=eps,
        D=columns,
        HAS_UPDATE=update is not None,
        BLOCK_D=triton.next_power_of_2(columns),
        num_warps=config.num_warps,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's norms: rows of 2,048, GDN heads of 128, attention heads of 256."""
    types = dict.fromkeys(("x", "update", "total", "normed", "gate", "q", "k"), "*bf16")
    types |= {"q_out": "*bf16", "k_out": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(("weight", "q_weight", "k_weight", "cos", "sin"), "*fp32")
    types |= dict.fromkeys(("x_stride", "update_stride"), "i32")
    types |= {f"{x}_stride": "i32" for x in ("gate_row", "gate_head", "q_row", "q_head")}
    types |= {"k_row_stride": "i32", "k_head_stride": "i32"}
    hidden = {"D": 2048, "BLOCK_D": 2048}
    heads = {"H": 16, "H_KV": 2, "D": 256, "HALF": 32, "BLOCK_D": 256, "BLOCK_HALF": 32}
    return (
        _case("add_rms_norm", rms_norm_kernel, types, hidden | {"HAS_UPDATE": True}),
        _case(
            "rms_norm",
            rms_norm_kernel,
            types | {"update": "constexpr", "total": "constexpr"},
            hidden | {"HAS_UPDATE": False, "update": None, "total": None},
        ),
        _case(
            "gated_rms_norm",
            gated_rms_norm_kernel,
            types | {"x": "*fp32"},
            {"H": 32, "D": 128, "BLOCK_D": 128},
        ),
        _case("norm_rotary", norm_rotary_kernel, types, heads),
    )


def _case(name: str, fn: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> GateCase:
    return GateCase(
        name=name,
        fn=fn,
        signature={arg: types[arg] for arg in fn.arg_names if arg in types},
        constexprs=constants,
        num_warps=_config(constants["D"]).num_warps,
        num_stages=1,
    )
