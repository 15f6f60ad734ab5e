"""Integers of 4 and 8 bits in 32-bit words: the one place that knows the bit order.

An integer is stored unsigned, moved by half its range: 4 bits hold value + 8, so -8 .. 7 is
0 .. 15, and 8 bits hold value + 128. A row's first column lies in a word's lowest bits:

    4 bits  words[n, k // 8]   bits  31..28      27..24      ...  7..4        3..0
                               column 8w + 7     8w + 6      ...  8w + 1      8w
    8 bits  words[n, k // 4]   bits  31..24      23..16      15..8       7..0
                               column 4w + 3     4w + 2      4w + 1      4w

On a little-endian machine the words of a row are therefore bytes in column order; with 4 bits the
low half of byte j is column 2j. This is the layout of compressed-tensors' `pack-quantized`.
"""

import sys

import torch
from torch import Tensor

WORD_BITS = 32
BITS = (4, 8)

if sys.byteorder != "little":
    raise ImportError("clover-local needs a little-endian machine")


def pack(values: Tensor, bits: int) -> Tensor:
    """Integers [..., K], each from -2^(bits-1) to 2^(bits-1) - 1, as int32 [..., K * bits / 32].

    Raises:
        ValueError: bits other than 4 or 8, a K that fills no whole words, a value out of range.
    """
    _check(bits)
    half = 1 << (bits - 1)
    if values.shape[-1] * bits % WORD_BITS:
        raise ValueError(
            f"{values.shape[-1]} columns of {bits} bits fill no whole words of {WORD_BITS} bits"
        )
    if values.numel() and not -half <= int(values.min()) <= int(values.max()) < half:
        raise ValueError(
            f"values from {int(values.min())} to {int(values.max())}, "
            f"{bits} bits hold {-half} to {half - 1}"
        )
    stored = (values + half).to(torch.uint8)
    if bits == 4:
        low, high = stored[..., 0::2], stored[..., 1::2]
        stored = low | (high << 4)
    return _compact(stored).view(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The integers [..., K] int8 that `pack` stored in `words` int32 [..., K * bits / 32].

    Raises:
        ValueError: bits other than 4 or 8, or words that are not int32.
    """
    _check(bits)
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}, not int32")
    stored = _compact(words).view(torch.uint8)
    if bits == 4:
        stored = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)
    half = 1 << (bits - 1)
    return (stored.to(torch.int16) - half).to(torch.int8)


def _compact(tensor: Tensor) -> Tensor:
    """Row by row in memory; `contiguous` leaves odd strides of axes of length 1, which `view` of
    another dtype refuses.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"{bits} bits, the widths are 4 and 8")
