"""new_conv = the last J - 1 rows of [conv | inputs]: of all GDN layers whose rows are accepted.

Defined by `conv_after` (the plain operator). L layers, T rows of C channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import check_dense, check_float
from clover_local.kernels.gpu.gate import GateCase

COLUMNS = 512
"""Of a program."""
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def keep_last_kernel(
    inputs,
    conv,
    new_conv,
    rows,
    row_stride,
    layer_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (columns, layer)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    inside = column < CHANNELS
    inputs += layer * layer_stride
    conv += layer * (KEPT * CHANNELS)
    new_conv += layer * (KEPT * CHANNELS)
    for place in tl.static_range(KEPT):
        source = rows + place - KEPT
        # Row by row, from the first: a row is read before a later one could take its place.
        x = tl.load(
            inputs + source.to(tl.int64) * row_stride + column,
            mask=inside & (source >= 0),
            other=0.0,
        ).to(tl.float32)
        x += tl.load(conv + (source + KEPT) * CHANNELS + column, inside & (source < 0), other=0.0)
        tl.store(new_conv + place * CHANNELS + column, x, mask=inside)


def keep_last(inputs: Tensor, conv: Tensor, *, new_conv: Tensor) -> None:
    """The conv states behind accepted rows.

    Args:
        inputs: [L, T, C] of the convolution, any float dtype, T at least 1; rows and layers may be
            apart.
        conv: [L, J - 1, C] float32, those before.
        new_conv: where they go; may be `conv` itself.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    layers, rows, channels = inputs.shape
    kept = conv.shape[1]
    check_float("inputs", inputs)
    if rows < 1 or inputs.stride(2) != 1:
        raise ValueError(f"{rows} rows (1 at least) with a last stride of {inputs.stride(2)} (1)")
    check_dense("conv", conv, shape=(layers, kept, channels), like=inputs)
    check_dense("new conv", new_conv, shape=(layers, kept, channels), like=inputs)
    if not layers:
        return
    keep_last_kernel[(triton.cdiv(channels, COLUMNS), layers)](
        inputs=inputs,
        conv=conv,
        new_conv=new_conv,
        rows=rows,
        row_stride=inputs.stride(1),
        layer_stride=inputs.stride(0),
        CHANNELS=channels,
        KEPT=kept,
        BLOCK=COLUMNS,
        num_warps=WARPS,
    )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's shape."""
    types = {"inputs": "*bf16", "conv": "*fp32", "new_conv": "*fp32"}
    return (
        GateCase(
            name="keep_last",
            fn=keep_last_kernel,
            signature=types | dict.fromkeys(("rows", "row_stride", "layer_stride"), "i32"),
            constexprs={"CHANNELS": 8192, "KEPT": 3, "BLOCK": COLUMNS},
            num_warps=WARPS,
            num_stages=1,
        ),
    )
