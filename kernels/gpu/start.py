"""hidden_states[t] = embedding[ids[t]], their norm; cos[t], sin[t]: the tables' rows at length + t.

Defined by `start_pass` (the plain operator); one launch. An embedding of 1 GB may stay in pinned
host memory, whose rows the kernel reads over the bus: a pass needs 32 rows of 4 KB.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import FLOATS, check_dense
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.norms import WIDEST
from clover_local.kernels.residual import Started

WARPS = 4
"""Of a program, which has a row: 2,048 floats of 16 bits are two loads of 16 bytes a thread."""


@triton.jit(do_not_specialize=["V", "N"])
def start_pass_kernel(
    ids,
    embedding,
    norm,
    length,
    cos,
    sin,
    hidden_states,
    normed,
    cos_rows,
    sin_rows,
    eps,
    V,
    N,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    # An id that is none is not read; its row of NaN says so.
    known = inside & (token >= 0) & (token < V)
    embedded = tl.load(embedding + token * D + d, mask=known, other=float("nan"))
    tl.store(hidden_states + row * D + d, embedded, mask=inside)
    wide = tl.where(inside, embedded.to(tl.float32), 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    gain = 1.0 + tl.load(norm + d, mask=inside, other=0.0)
    tl.store(normed + row * D + d, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)
    position = tl.minimum(tl.load(length).to(tl.int64) + row, N - 1)
    i = tl.arange(0, BLOCK_HALF)
    source, target = position * HALF + i, row * HALF + i
    tl.store(cos_rows + target, tl.load(cos + source, mask=i < HALF), mask=i < HALF)
    tl.store(sin_rows + target, tl.load(sin + source, mask=i < HALF), mask=i < HALF)


def start_pass(
    ids: Tensor,
    *,
    embedding: Tensor,
    norm: Tensor,
    eps: float,
    length: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Started:
    """The embedded rows of a pass behind `length` committed tokens, and their rotary angles.

    Args:
        ids: [T] int64; an id outside the embedding makes a row of NaN.
        embedding: [V, D], contiguous, up to 4,096 columns; on the device of `ids`, or pinned on
            the host.
        norm: [D] float32, the weight of the first layer's norm; `eps` is in it.
        length: [1] int32; a row whose position is behind the tables has their last row.
        cos: [N, R / 2] float32, by position.
        sin: likewise.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if ids.dim() != 1 or len(ids) == 0:
        raise ValueError(f"ids are {list(ids.shape)}, not [T]")
    check_dense("ids", ids, shape=ids.shape, like=ids, dtype=torch.int64)
    _check_embedding(embedding, device=ids.device)
    check_dense("norm", norm, shape=embedding.shape[1:], like=ids)
    check_dense("length", length, shape=[1], like=ids, dtype=torch.int32)
    if cos.dim() != 2 or 0 in cos.shape:
        raise ValueError(f"cos is {list(cos.shape)}, not [N, R / 2]")
    for name, table in (("cos", cos), ("sin", sin)):
        check_dense(name, table, shape=cos.shape, like=ids)
    (rows,), (size, columns), (positions, half) = ids.shape, embedding.shape, cos.shape
    started = Started(
        torch.empty(rows, columns, dtype=embedding.dtype, device=ids.device),
        torch.empty(rows, columns, dtype=embedding.dtype, device=ids.device),
        torch.empty(rows, half, dtype=torch.float32, device=ids.device),
        torch.empty(rows, half, dtype=torch.float32, device=ids.device),
    )
    start_pass_kernel[(rows,)](
        ids=ids,
        embedding=embedding,
        norm=norm,
        length=length,
        cos=cos,
        sin=sin,
        hidden_states=started.hidden_states,
        normed=started.normed,
        cos_rows=started.cos,
        sin_rows=started.sin,
        eps=eps,
        V=size,
        N=positions,
        D=columns,
        HALF=half,
        BLOCK_D=triton.next_power_of_2(columns),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=WARPS,
    )
    return started


def _check_embedding(embedding: Tensor, *, device: torch.device) -> None:
    if embedding.dim() != 2 or 0 in embedding.shape:
        raise ValueError(f"the embedding is {list(embedding.shape)}, not [V, D]")
    if embedding.shape[1] > WIDEST:
        raise ValueError(f"{embedding.shape[1]} columns, from 1 to {WIDEST} fit in a program")
    if embedding.dtype not in FLOATS or not embedding.is_contiguous():
        raise ValueError(
            f"the embedding is {embedding.dtype} with strides {embedding.stride()}, "
            f"not one of {', '.join(map(str, FLOATS))} without gaps"
        )
    on_host = embedding.device.type == "cpu" and device.type == "cuda" and embedding.is_pinned()
    if embedding.device != device and not on_host:
        raise ValueError(f"the embedding is on {embedding.device}, not pinned; ids on {device}")


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's rows of 2,048, heads of 256 that rotate 64 dimensions."""
    types = {"ids": "*i64", "length": "*i32", "eps": "fp32", "V": "i32", "N": "i32"}
    types |= dict.fromkeys(("embedding", "hidden_states", "normed"), "*bf16")
    types |= dict.fromkeys(("norm", "cos", "sin", "cos_rows", "sin_rows"), "*fp32")
    return (
        GateCase(
            name="start_pass",
            fn=start_pass_kernel,
            signature=types,
            constexprs={"D": 2048, "HALF": 32, "BLOCK_D": 2048, "BLOCK_HALF": 32},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
