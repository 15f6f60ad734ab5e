"""controlled = logits after bans, penalties and biases: what the sampling kernels share.

Defined by `Controls` (clover_local/decoding/controls.py). Controls are lists of few ids; comparing
each of V columns with every id would cost more than the softmax. So the lists are first written
into one table of codes, which all rows share:

    code   bits 31..3: how often the response has the token   2: ends thinking   1: stop   0: banned

one for each of V columns and, behind them, one number for each BLOCK_V columns: whether any of
those has a code. Elsewhere the table is not read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.gate import GateCase

BLOCK = 256
"""Ids of each list at once."""
WARPS = 4


@dataclass(frozen=True, eq=False)
class ControlTensors:
    """`Controls` (clover_local/decoding/controls.py) on the device; all dense. Off: empty or 0."""

    banned: Tensor  # [n] int64
    seen: Tensor  # [m] int64, distinct
    counts: Tensor  # [m] float32, whole numbers
    seen_count: Tensor  # [1] int32: how many of `seen` count, the rest is room
    penalties: Tensor  # [3] float32: presence, frequency, repetition (off: 0, 0, 1)
    stop_ids: Tensor  # [s] int64
    stop_bias: Tensor  # [rows] float32
    think_end_ids: Tensor  # [0 or 1] int64
    think_end_bias: Tensor  # [rows] float32


@triton.jit
def _mark(codes, token, first, bit, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Sets `bit` of those tokens that are this program's, and says so behind the codes."""
    own = (token >= first) & (token < first + BLOCK_V) & (token < V)
    tl.atomic_or(codes + token, bit, mask=own)
    tl.atomic_or(codes + V + token // BLOCK_V, 1, mask=own)
    return own


@triton.jit(do_not_specialize=["banned_n", "seen_n", "stop_n", "think_end_n"])
def mark_kernel(
    banned,
    seen,
    counts,
    seen_count,
    stop_ids,
    think_end_ids,
    codes,
    banned_n,
    seen_n,
    stop_n,
    think_end_n,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (columns): its codes and their mark, from those ids of the lists that are among them.

    Every program reads all lists: a few KB, and one launch less than zeros and then ids.
    """
    split = tl.program_id(0)
    first = split * BLOCK_V
    column = first + tl.arange(0, BLOCK_V)
    tl.store(codes + column, tl.zeros([BLOCK_V], tl.int32), mask=column < V)
    tl.store(codes + V + split, 0)
    tl.debug_barrier()  # the zeros come before the bits
    seen_n = tl.minimum(seen_n, tl.load(seen_count))
    longest = tl.maximum(tl.maximum(banned_n, seen_n), tl.maximum(stop_n, think_end_n))
    for begin in range(0, longest, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        token = tl.load(banned + i, mask=i < banned_n, other=V)
        _mark(codes, token, first, 1, V, BLOCK_V)
        token = tl.load(stop_ids + i, mask=i < stop_n, other=V)
        _mark(codes, token, first, 2, V, BLOCK_V)
        token = tl.load(think_end_ids + i, mask=i < think_end_n, other=V)
        _mark(codes, token, first, 4, V, BLOCK_V)
        token = tl.load(seen + i, mask=i < seen_n, other=V)
        count = tl.load(counts + i, mask=i < seen_n, other=0.0).to(tl.int32)
        own = _mark(codes, token, first, 0, V, BLOCK_V)
        tl.atomic_add(codes + token, count * 8, mask=own)


@triton.jit
def controlled_logits(raw, code, penalties, stop_bias, think_end_bias):
    """`raw` after the controls: repetition, then the biases of the row, then bans."""
    count = (code >> 3).to(tl.float32)
    repetition = tl.load(penalties + 2)
    x = raw - count * tl.load(penalties + 1) - tl.load(penalties)
    x = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    x = tl.where(count > 0, x, raw)
    x += tl.where((code & 2) != 0, stop_bias, 0.0)
    x += tl.where((code & 4) != 0, think_end_bias, 0.0)
    return tl.where((code & 1) != 0, float("-inf"), x)


def control_codes(
    controls: ControlTensors, *, vocabulary: int, block_v: int, device: torch.device
) -> Tensor:
    """The table [V + splits] int32 of these controls."""
    splits = triton.cdiv(vocabulary, block_v)
    codes = torch.empty(vocabulary + splits, dtype=torch.int32, device=device)
    mark_kernel[(splits,)](
        banned=controls.banned,
        seen=controls.seen,
        counts=controls.counts,
        seen_count=controls.seen_count,
        stop_ids=controls.stop_ids,
        think_end_ids=controls.think_end_ids,
        codes=codes,
        banned_n=len(controls.banned),
        seen_n=len(controls.seen),
        stop_n=len(controls.stop_ids),
        think_end_n=len(controls.think_end_ids),
        V=vocabulary,
        BLOCK_V=block_v,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return codes


def check_controls(controls: ControlTensors, *, rows: int, device: torch.device) -> None:
    """The controls are those of so many rows, on `device`.

    Raises:
        ValueError: they are not.
    """
    wanted: dict[str, tuple[torch.dtype, int | None]] = {
        "banned": (torch.int64, None),
        "seen": (torch.int64, None),
        "counts": (torch.float32, len(controls.seen)),
        "seen_count": (torch.int32, 1),
        "penalties": (torch.float32, 3),
        "stop_ids": (torch.int64, None),
        "stop_bias": (torch.float32, rows),
        "think_end_ids": (torch.int64, None),
        "think_end_bias": (torch.float32, rows),
    }
    for name, (dtype, length) in wanted.items():
        x: Tensor = getattr(controls, name)
        if x.dtype != dtype or x.dim() != 1 or not x.is_contiguous():
            raise ValueError(f"{name} is {list(x.shape)} {x.dtype}, not one dense row of {dtype}")
        if length is not None and len(x) != length:
            raise ValueError(f"{name} has {len(x)} numbers, not {length}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, the logits on {device}")


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's vocabulary."""
    types = dict.fromkeys(("banned", "seen", "stop_ids", "think_end_ids"), "*i64")
    types |= {"counts": "*fp32", "seen_count": "*i32", "codes": "*i32"}
    types |= dict.fromkeys(("banned_n", "seen_n", "stop_n", "think_end_n"), "i32")
    return (
        GateCase(
            name="controls",
            fn=mark_kernel,
            signature=types,
            constexprs={"V": 248320, "BLOCK_V": 4096, "BLOCK": BLOCK},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
