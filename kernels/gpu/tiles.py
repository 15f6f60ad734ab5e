"""acc[n, m] = sum_k weight[n, k] * x[m, k] for a tile of a packed weight: the loop of our products.

The weight is the wide side of the product and rows of x are the narrow one: a pass has few rows,
and a matrix instruction has 16 places on its first side but only 8 on its second.

A 32-bit word holds columns in the order of `int4.py`. Bits 0 .. 15 and 16 .. 31 of

    (word >> bits * part) & mask

are two integers, each in the place of a 16-bit float: with the exponent of 128 (bfloat16) or 1024
(float16) put above them they are floats, and one packed subtraction moves both to their value. This
takes about 1.5 instructions a weight. Such a pair are columns 8w + part and 8w + part + 4 (4 bits;
8 bits: 4w + part and 4w + part + 2), so the columns of one part are `part`, `part + parts`, ...
Activations are read in words of `parts` neighbours, and part i of each word goes with part i of the
weights: nothing is shuffled and nothing is copied to be shuffled.

Integers up to 255 are exact in both floats. A piece of columns never straddles two groups, so its
product is multiplied by the group's scale in float32: weights are never rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def as_words(x: Tensor, *, bits: int) -> Tensor:
    """`x` [..., K] as `matrix_tile` reads it: words of 16 / bits columns, or plain float32."""
    if x.dtype == torch.float32:
        return x
    return x.view(torch.int64 if bits == 4 else torch.int32)


@triton.jit
def halves(bits, DTYPE: tl.constexpr):
    """[R, W] words to [R, 2 W] 16-bit floats, low half first."""
    low = (bits & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), [bits.shape[0], 2 * bits.shape[1]])


@triton.jit
def weight_part(words, PART: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The signed values of part PART of `words` [R, W]: [R, 2 W], exact."""
    shifted = words >> (BITS * PART)
    if tl.float32 == DTYPE:
        integers = shifted & (0x00010001 * ((1 << BITS) - 1))
        low, high = (integers & 0xFFFF).to(tl.float32), (integers >> 16).to(tl.float32)
        pairs = tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]])
        values = pairs - (1 << (BITS - 1))
    elif tl.float16 == DTYPE:
        # 0x6400 is 1024, and the last of the 10 bits of its fraction counts 1.
        integers = (shifted & (0x00010001 * ((1 << BITS) - 1))) | 0x64006400
        values = halves(integers, DTYPE) - (1024.0 + (1 << (BITS - 1)))
    elif BITS == 4:
        # 0x4300 is 128, and the last of the 7 bits of its fraction counts 1.
        values = halves((shifted & 0x000F000F) | 0x43004300, DTYPE) - 136.0
    else:
        # 7 bits as above; the eighth chooses 128 or, where it is 0, 256 (0x4380) to be taken away.
        seven = (shifted & 0x007F007F) | 0x43004300
        offset = ((shifted & 0x00800080) ^ 0x00800080) | 0x43004300
        values = halves(seven, DTYPE) - halves(offset, DTYPE)
    return values.to(DTYPE)


@triton.jit
def x_part(x_ptrs, x_words, x_mask, PART: tl.constexpr, DTYPE: tl.constexpr):
    """Part PART of each word of 16-bit floats; float32 has no such words and is loaded here."""
    if tl.float32 == DTYPE:
        x = tl.load(x_ptrs + PART, mask=x_mask, other=0.0)
    else:
        x = ((x_words >> (16 * PART)) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return x


@triton.jit
def fold_columns(even, odd):
    """Two [R, C] as one [R, 2 C], column by column."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def fold_rows(even, odd):
    """Two [C, R] as one [2 C, R], row by row."""
    joined = tl.permute(tl.join(even, odd), (0, 2, 1))
    return tl.reshape(joined, [2 * even.shape[0], even.shape[1]])


@triton.jit
def piece_product(
    words,  # [BLOCK_N, PIECE * BITS / 32] int32
    x_ptrs,  # [PIECE / PARTS, BLOCK_M]: to words of x, or to the first column of each if float32
    x_mask,  # [1, BLOCK_M]
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    SUM_X: tl.constexpr,
):
    """values[n, k] times x[m, k] summed over a piece of columns; the same for values of 1."""
    PARTS: tl.constexpr = 16 // BITS
    # A matrix instruction takes 16 columns: pieces of 32 columns of 4 bits go two parts at a time.
    FOLD: tl.constexpr = x_ptrs.shape[0] < 16
    product = tl.zeros([words.shape[0], x_ptrs.shape[1]], tl.float32)
    x_sum = tl.zeros([words.shape[0], x_ptrs.shape[1]], tl.float32)
    x_words = 0 if tl.float32 == DTYPE else tl.load(x_ptrs, mask=x_mask, other=0)
    for part in tl.static_range(0, PARTS, 2 if FOLD else 1):
        values = weight_part(words, part, BITS, DTYPE)
        x = x_part(x_ptrs, x_words, x_mask, part, DTYPE)
        if FOLD:
            values = fold_columns(values, weight_part(words, part + 1, BITS, DTYPE))
            x = fold_rows(x, x_part(x_ptrs, x_words, x_mask, part + 1, DTYPE))
        product = tl.dot(values, x, product, input_precision="ieee")
        if SUM_X:
            # One more matrix instruction: a sum over a dimension would pass through shared memory.
            # Ones are made of the values so that both products ask for x in the same layout: only
            # then is x copied ahead.
            ones = (values * 0.0 + 1.0).to(DTYPE)
            x_sum = tl.dot(ones, x, x_sum, input_precision="ieee")
    return product, x_sum


@triton.jit
def scaled(
    product,  # [BLOCK_N, BLOCK_M]
    x_sum,  # [BLOCK_N, BLOCK_M], every row the same
    scale_ptrs,
    minimum_ptrs,
    mask,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """product * scale [+ (minimum + scale * 2^(BITS-1)) * x_sum: minima count from stored 0]."""
    scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
    result = product * scale[:, None]
    if MINIMUM:
        minimum = tl.load(minimum_ptrs, mask=mask, other=0.0)
        result += (minimum + scale * (1 << (BITS - 1)))[:, None] * x_sum
    return result


@triton.jit
def row_words(K, BITS: tl.constexpr):
    """32-bit words of a row of K columns. K is a multiple of 32, so rows start at 16 bytes."""
    return tl.multiple_of(K * BITS // 32, 4)


@triton.jit
def matrix_tile(
    words_ptrs,  # [BLOCK_N] each row's words, int32
    scale_ptrs,  # [BLOCK_N] each row's scales
    minimum_ptrs,  # [BLOCK_N] each row's minima, float32; any pointers without MINIMUM
    n_mask,  # [BLOCK_N]
    x_ptr,  # [rows, K]: as words of 16 / BITS columns, or float32
    x_rows,  # [BLOCK_M] rows of x
    x_mask,  # [BLOCK_M]
    K,
    first_step,
    end_step,  # steps of PIECE * PIECES columns
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,  # columns of a product; divides GROUP
    PIECES: tl.constexpr,  # products of a step
    MINIMUM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """acc [BLOCK_N, BLOCK_M] float32 over the columns of some steps."""
    PARTS: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = PIECE * BITS // 32
    X_WORDS: tl.constexpr = PIECE // PARTS
    X_UNIT: tl.constexpr = PARTS if tl.float32 == DTYPE else 1
    row_words_ptrs = words_ptrs[:, None] + tl.arange(0, WORDS)[None, :]
    x_ptrs = x_ptr + X_UNIT * (
        x_rows.to(tl.int64)[None, :] * (K // PARTS) + tl.arange(0, X_WORDS)[:, None]
    )
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, end_step):
        for piece in tl.static_range(PIECES):
            place = step * PIECES + piece
            words = tl.load(row_words_ptrs + place * WORDS, mask=n_mask[:, None], other=0)
            product, x_sum = piece_product(
                words, x_ptrs + place * X_WORDS * X_UNIT, x_mask[None, :], BITS, DTYPE, MINIMUM
            )
            group = place * PIECE // GROUP
            acc += scaled(
                product, x_sum, scale_ptrs + group, minimum_ptrs + group, n_mask, BITS, MINIMUM
            )
    return acc
