"""cached[L + t] = rows[t] for keys and values at once, where L is on the device.

What `SequenceState.append` does with a length that the host knows; a captured pass has none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_rows
from clover_local.kernels.gpu.gate import GateCase

COLUMNS = 512
"""A program's part of a row: a whole row of the real model, so one program a row."""
WARPS = 4


@triton.jit
def append_kernel(
    keys,
    values,
    cached_keys,
    cached_values,
    length,
    key_row,
    key_head,
    value_row,
    value_head,
    room,
    HEADS: tl.constexpr,
    DH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, columns)."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = column // DH
    d = column % DH
    place = tl.load(length) + t
    here = (column < HEADS * DH) & (place < room)
    x = tl.load(keys + t * key_row + head * key_head + d, mask=here)
    y = tl.load(values + t * value_row + head * value_head + d, mask=here)
    tl.store(cached_keys + place * (HEADS * DH) + column, x, mask=here)
    tl.store(cached_values + place * (HEADS * DH) + column, y, mask=here)


def append_rows(
    keys: Tensor,
    values: Tensor,
    *,
    cached_keys: Tensor,
    cached_values: Tensor,
    length: Tensor,
) -> None:
    """Writes new rows behind the committed ones; those past the buffer's end are dropped.

    A pass of a fixed number of rows may have some that do not count, and they may be the ones past
    the end; that the others fit is the caller's to know.

    Args:
        keys: [T, H_kv, Dh]; rows and heads may be apart.
        values: as `keys`.
        cached_keys: [N, H_kv, Dh] contiguous.
        cached_values: as `cached_keys`.
        length: how many rows are committed, one int32 on the device, 0 to N.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    rows, heads, dh = keys.shape
    check_rows("keys", keys, shape=(rows, heads, dh), like=keys)
    check_rows("values", values, shape=(rows, heads, dh), like=keys)
    cache = (len(cached_keys), heads, dh)
    check_dense("cached keys", cached_keys, shape=cache, like=keys, dtype=keys.dtype)
    check_dense("cached values", cached_values, shape=cache, like=keys, dtype=keys.dtype)
    check_dense("length", length, shape=(1,), like=keys, dtype=torch.int32)
    append_kernel[(rows, triton.cdiv(heads * dh, COLUMNS))](
        keys=keys,
        values=values,
        cached_keys=cached_keys,
        cached_values=cached_values,
        length=length,
        key_row=keys.stride(0),
        key_head=keys.stride(1),
        value_row=values.stride(0),
        value_head=values.stride(1),
        room=len(cached_keys),
        HEADS=heads,
        DH=dh,
        BLOCK=COLUMNS,
        num_warps=WARPS,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shape."""
    pointers = ("keys", "values", "cached_keys", "cached_values")
    integers = ("key_row", "key_head", "value_row", "value_head", "room")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(integers, "i32")
    return (
        GateCase(
            name="append_rows",
            fn=append_kernel,
            signature=types | {"length": "*i32"},
            constexprs={"HEADS": 2, "DH": 256, "BLOCK": COLUMNS},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
