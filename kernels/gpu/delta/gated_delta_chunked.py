"""The gated delta rule by chunks of rows, for prompts: prepare, state and output stages.

Defined by `gated_delta_chunked` (the WY form of Yang et al., "Gated Delta Networks", 2024, section
3.3). Within a chunk with the rows 1 .. C and S before it:

    (I + A) [u | w] = [beta v | beta k decay]      A = tril(beta k k^T decay between, -1)
    change = u - w S
    o = ((q decay) S + tril(q k^T decay between) change) / sqrt(Dk)
    S = S decay of all + (k decay until the end)^T change

The first line is the prepare stage, the second and the fourth are the state stage, the third is the
output stage: `gated_delta_stages.py`. Shapes as in `gated_delta_commit`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from clover_local.kernels.gpu.check import check_heads
from clover_local.kernels.gpu.delta.gated_delta_commit import check_rule
from clover_local.kernels.gpu.delta.gated_delta_stages import (
    output_kernel,
    prepare_kernel,
    state_kernel,
)
from clover_local.kernels.gpu.gate import GateCase


@dataclass(frozen=True)
class ChunkedConfig:
    """Rows a chunk; columns of S a program in the last two stages; warps, the same in all three."""

    chunk: int
    state_values: int
    output_values: int
    num_warps: int


# Products in tf32x3, which is as good as float32, take two registers for every one of tf32: chunks
# of 64 rows, or 32 columns of S, need more than a thread has.
CHUNKED = ChunkedConfig(chunk=32, state_values=16, output_values=64, num_warps=4)
STEP = 32
"""Columns or rows of a head that one product takes, of at least 16."""
SPAN = 512
"""Rows whose intermediates are in memory at once: 50 MB for the real model."""


def gated_delta_chunked(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    new_state: Tensor | None = None,
    config: ChunkedConfig = CHUNKED,
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_recurrent`, to rounding; for prompts: any number of rows, all of them count.

    Arguments, results and errors as there. Its intermediates are allocated anew for every span of
    rows: not for a CUDA graph.
    """
    after = torch.empty_like(state) if new_state is None else new_state
    check_heads("q", q, shape=k.shape, like=k)
    if state.shape[1] > 4 * STEP:
        raise ValueError(f"{state.shape[1]} rows in a head's state, at most {4 * STEP}")
    check_rule(k, v=v, g=g, beta=beta, state=state, after=after)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    before = state
    for start in range(0, len(q), SPAN):
        span = slice(start, start + SPAN)
        _launch_chunked(
            q[span],
            k[span],
            v=v[span],
            g=g[span],
            beta=beta[span],
            before=before,
            after=after,
            out=out[span],
            config=config,
        )
        before = after
    return out, after


def _launch_chunked(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor,
    after: Tensor,
    out: Tensor,
    config: ChunkedConfig,
) -> None:
    rows, (value_heads, dk, dv) = len(q), before.shape
    chunks, repeats = triton.cdiv(rows, config.chunk), value_heads // k.shape[1]
    u, w = torch.empty_like(out), out.new_empty(rows, value_heads, dk)
    since_start, until_end = torch.empty_like(g), torch.empty_like(g)
    starts = out.new_empty(chunks, value_heads, dk, dv)
    prepare_kernel[(chunks, value_heads)](
        k=k,
        v=v,
        g=g,
        beta=beta,
        u=u,
        w=w,
        since_start=since_start,
        until_end=until_end,
        rows=rows,
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        H_V=value_heads,
        REPEATS=repeats,
        DK=dk,
        DV=dv,
        C=config.chunk,
        STEP=STEP,
        num_warps=config.num_warps,
        num_stages=1,
    )
    state_kernel[(value_heads, triton.cdiv(dv, config.state_values))](
        k=k,
        u=u,
        w=w,
        since_start=since_start,
        until_end=until_end,
        state=before,
        starts=starts,
        new_state=after,
        rows=rows,
        k_stride=k.stride(0),
        H_V=value_heads,
        REPEATS=repeats,
        DK=dk,
        DV=dv,
        C=config.chunk,
        STEP=STEP,
        BLOCK_V=config.state_values,
        num_warps=config.num_warps,
        num_stages=1,
    )
    output_kernel[(chunks, value_heads, triton.cdiv(dv, config.output_values))](
        q=q,
        k=k,
        g=g,
        change=u,
        since_start=since_start,
        starts=starts,
        out=out,
        rows=rows,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        scale=dk**-0.5,
        H_V=value_heads,
        REPEATS=repeats,
        DK=dk,
        DV=dv,
        C=config.chunk,
        STEP=STEP,
        BLOCK_V=config.output_values,
        num_warps=config.num_warps,
        num_stages=1,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shapes: the three stages."""
    names = {name for fn in (prepare_kernel, state_kernel, output_kernel) for name in fn.arg_names}
    types = dict.fromkeys(names, "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("rows", "q_stride", "k_stride", "v_stride"), "i32")
    shape = {"H_V": 32, "REPEATS": 2, "DK": 128, "DV": 128, "C": CHUNKED.chunk, "STEP": STEP}
    return tuple(
        GateCase(
            name=f"gated_delta_chunked {name}",
            fn=fn,
            signature={key: types[key] for key in fn.arg_names if key.islower()},
            constexprs=shape | block,
            num_warps=CHUNKED.num_warps,
            num_stages=1,
        )
        for name, fn, block in (
            ("prepare", prepare_kernel, {}),
            ("state", state_kernel, {"BLOCK_V": CHUNKED.state_values}),
            ("output", output_kernel, {"BLOCK_V": CHUNKED.output_values}),
        )
    )
