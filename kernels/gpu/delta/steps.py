"""Steps of `gated_delta_conv_kernel` that stand by themselves, as functions that Triton inlines."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    # log(1 + e^x) = max(x, 0) + 2 atanh(s), s = e / (2 + e), e = e^-|x| <= 1, so s <= 1/3: keeps
    # the relative precision of small results, which log(1 + e) does not.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 15.0
    for i in tl.static_range(7):
        series = series * s2 + 1.0 / (13.0 - 2.0 * i)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def keep_last_rows(
    qkv,
    row_stride,
    conv_state,
    new_conv_state,
    end,
    column,
    in_head,
    CHANNELS: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    # The last LEFT - 1 rows of [conv_state | the first `end` rows of qkv]. Only a head's first tile
    # reads the old state, and it has read all of it before it writes: the new one may lie there.
    place = tl.arange(0, BLOCK_J)
    source = end + place - (LEFT - 1)
    kept = (place < LEFT - 1)[:, None] & in_head[None, :]
    x = tl.load(
        qkv + source.to(tl.int64)[:, None] * row_stride + column[None, :],
        mask=kept & (source >= 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    x += tl.load(
        conv_state + (source + (LEFT - 1))[:, None] * CHANNELS + column[None, :],
        mask=kept & (source < 0)[:, None],
        other=0.0,
    )
    tl.debug_barrier()
    tl.store(new_conv_state + place[:, None] * CHANNELS + column[None, :], x, mask=kept)
