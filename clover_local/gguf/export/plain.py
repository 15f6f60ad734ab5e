"""Q8_0 and Q4_0 by the definition, in numpy: the same bytes as ggml's, where its library is absent.

    Q8_0   32 numbers: float16 d, 32 x int8;           d = max |x| / 127,  q = round(x / d)
    Q4_0   32 numbers: float16 d, 16 bytes of two;     d = x of largest |x| / -8,
           q = min(15, int(x / d + 8.5)); byte j holds number j low and number j + 16 high

After `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` in ggml's `ggml-quants.c`.
"""

import numpy as np
from numpy.typing import NDArray

BLOCK = 32

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def encode_q8_0(values: Floats) -> Bytes:
    """[rows, columns] to [rows, bytes]."""
    x = values.reshape(len(values), -1, BLOCK)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    whole = np.trunc(scaled)
    # Half is rounded away from 0, as C's roundf does; the difference is exact.
    integers = (whole + np.trunc(2 * (scaled - whole))).astype(np.int8)
    return _joined(scale, integers.view(np.uint8))


def encode_q4_0(values: Floats) -> Bytes:
    """[rows, columns] to [rows, bytes]."""
    x = values.reshape(len(values), -1, BLOCK)
    largest = np.abs(x).argmax(-1)[..., None]
    scale = np.take_along_axis(x, largest, -1) / np.float32(-8)
    stored = np.minimum(x * _inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    half = BLOCK // 2
    return _joined(scale, stored[..., :half] | stored[..., half:] << 4)


def encode_f16(values: Floats) -> Bytes:
    """[rows, columns] to [rows, bytes]; nearest, ties to even."""
    return np.ascontiguousarray(values, "<f2").view(np.uint8)


def encode_bf16(values: Floats) -> Bytes:
    """[rows, columns] to [rows, bytes]; nearest, ties to even. `values` are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def encode_f32(values: Floats) -> Bytes:
    """[rows, columns] to [rows, bytes]."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for a block of zeros."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _joined(scale: Floats, stored: Bytes) -> Bytes:
    blocks = np.concatenate([scale.astype("<f2").view(np.uint8), stored], -1)
    return blocks.reshape(len(blocks), -1)
