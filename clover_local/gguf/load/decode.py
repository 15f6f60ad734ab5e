"""GGUF blocks as `PackedWeight`s: every type here without rounding, since ggml's are integers too.

    Q8_0             INT8 g32                 Q4_0          INT4 g32
    Q5_0, IQ4_NL     INT8 g32                 Q4_1, Q4_K    INT4 g32 with minima
    IQ4_XS           INT8 g32                 Q5_1, Q5_K    INT8 g32 with minima
    Q6_K             INT8 g16                 Q2_K          INT4 g16 with minima
    Q3_K             INT4 g16

Scales are float16 as in the file, or where a block has scales of its scales their product, which
float32 holds exactly. Layouts are those of ggml's `ggml-common.h`, arithmetic that of its
`dequantize_row_*`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clover_local.checkpoint.read import TORCH_DTYPES
from clover_local.gguf.types import DECODED, PLAIN_TYPES, TensorType
from clover_local.kernels.packed import PackedWeight, Weight

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Blocks = Tensor
"""uint8 [rows, blocks, bytes of a block]."""


def decode(content: Tensor, kind: TensorType, shape: tuple[int, int]) -> Weight:
    """A matrix of `shape` from its bytes (uint8): packed, or plain in the file's own dtype.

    Raises:
        ValueError: a type that no rule decodes.
    """
    rows, columns = shape
    if kind.name in PLAIN_TYPES:
        if content.storage_offset() % kind.nbytes:
            content = content.clone()
        return content.view(TORCH_DTYPES[kind.name]).view(shape)
    if kind.name not in _DECODERS:
        raise ValueError(f"{kind.name} is none of {', '.join(DECODED)}")
    return _DECODERS[kind.name](content.view(rows, columns // kind.block, kind.nbytes))


def _half(blocks: Blocks, at: int) -> Tensor:
    """A float16 of every block, [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high four bits of each byte."""
    return packed & 15, packed >> 4


def _int8(stored: Tensor, scale: Tensor, *, minimum: Tensor | None = None) -> PackedWeight:
    """From stored 0 .. 255 [rows, groups, group size] and scales [rows, groups]."""
    data = stored.flatten(1).view(torch.int32)
    return PackedWeight(data, scale.contiguous(), _minimum(minimum), 8, stored.shape[-1])


def _int4(stored: Tensor, scale: Tensor, *, minimum: Tensor | None = None) -> PackedWeight:
    """From stored 0 .. 15 [rows, groups, group size] and scales [rows, groups]."""
    pairs = stored.contiguous().view(torch.int16)  # the second of two is the high byte
    data = (pairs | pairs >> 4).to(torch.uint8).flatten(1).view(torch.int32)
    return PackedWeight(data, scale.contiguous(), _minimum(minimum), 4, stored.shape[-1])


def _minimum(minimum: Tensor | None) -> Tensor | None:
    return None if minimum is None else minimum.float().contiguous()


def _q8_0(blocks: Blocks) -> PackedWeight:
    return _int8(blocks[..., 2:] ^ 128, _half(blocks, 0))


def _q4_0(blocks: Blocks) -> PackedWeight:
    return _int4(torch.cat(_halves(blocks[..., 2:]), -1), _half(blocks, 0))


def _q4_1(blocks: Blocks) -> PackedWeight:
    stored = torch.cat(_halves(blocks[..., 4:]), -1)
    return _int4(stored, _half(blocks, 0), minimum=_half(blocks, 2))


def _fifth_bits(words: Tensor) -> Tensor:
    """Bit i of 4 bytes as 16 or 0 at i, [..., 32]."""
    bits = words[..., None] >> torch.arange(8, dtype=torch.uint8, device=words.device) & 1
    return bits.flatten(-2) << 4


def _q5_0(blocks: Blocks) -> PackedWeight:
    stored = torch.cat(_halves(blocks[..., 6:]), -1) | _fifth_bits(blocks[..., 2:6])
    return _int8(stored + (128 - 16), _half(blocks, 0))


def _q5_1(blocks: Blocks) -> PackedWeight:
    stored = torch.cat(_halves(blocks[..., 8:]), -1) | _fifth_bits(blocks[..., 4:8])
    return _int8(stored, _half(blocks, 0), minimum=_half(blocks, 2))


def _super_scales(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, [rows, groups] float32.

    Six bits each in bytes 4 .. 15: scales 0-3 and minima 0-3 in the low bits of bytes 0-3 and 4-7;
    those of 4-7 are the halves of bytes 8-11 with two bits from the tops of the bytes before.
    """
    d, d_min = _half(blocks, 0).float(), _half(blocks, 2).float()
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    low, high = _halves(third)
    scales = torch.cat([first & 63, low | first >> 6 << 4], -1).float()
    minima = torch.cat([second & 63, high | second >> 6 << 4], -1).float()
    return (d[..., None] * scales).flatten(1), (-d_min[..., None] * minima).flatten(1)


def _groups_of_32(packed: Tensor) -> Tensor:
    """128 bytes of a block as 8 groups of 32: of each 32 bytes the low halves, then the high."""
    return torch.stack(_halves(torch.unflatten(packed, -1, (4, 32))), -2).flatten(-3, -2)


def _q4_k(blocks: Blocks) -> PackedWeight:
    scale, minimum = _super_scales(blocks)
    return _int4(_groups_of_32(blocks[..., 16:]).flatten(1, 2), scale, minimum=minimum)


def _q5_k(blocks: Blocks) -> PackedWeight:
    scale, minimum = _super_scales(blocks)
    bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> bit & 1) << 4  # group g has bit g of all 32 bytes
    stored = _groups_of_32(blocks[..., 48:]) | fifth
    return _int8(stored.flatten(1, 2), scale, minimum=minimum)


def _q6_k(blocks: Blocks) -> PackedWeight:
    low = torch.unflatten(blocks[..., :128], -1, (2, 2, 32))  # half of the block, quarter, number
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    four = torch.cat(_halves(low), -2)  # 32s of numbers: 0, 1 low halves, 2, 3 high halves
    stored = four | (high >> shift & 3) << 4
    scales = blocks[..., 192:208].view(torch.int8).float()
    scale = (_half(blocks, 208).float()[..., None] * scales).flatten(1)
    return _int8(_groups_of_16((stored + (128 - 32)).flatten(2)), scale)


def _two_bits(packed: Tensor) -> Tensor:
    """64 bytes of a block as 256 numbers of two bits: of each 32 bytes first the lowest bits."""
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (torch.unflatten(packed, -1, (2, 1, 32)) >> shift & 3).flatten(-3)


def _groups_of_16(stored: Tensor) -> Tensor:
    return torch.unflatten(stored, -1, (16, 16)).flatten(1, 2)


def _q3_k(blocks: Blocks) -> PackedWeight:
    bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    third = ((blocks[..., None, :32] >> bit & 1) << 2).flatten(-2)
    stored = _two_bits(blocks[..., 32:96]) + third + (8 - 4)
    low = torch.cat(_halves(blocks[..., 96:104]), -1)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., None, 104:108] >> shift & 3).flatten(-2)
    scales = (low | high << 4).float() - 32
    scale = (_half(blocks, 108).float()[..., None] * scales).flatten(1)
    return _int4(_groups_of_16(stored), scale)


def _q2_k(blocks: Blocks) -> PackedWeight:
    scales, minima = _halves(blocks[..., :16])
    d, d_min = _half(blocks, 80).float()[..., None], _half(blocks, 82).float()[..., None]
    stored = _groups_of_16(_two_bits(blocks[..., 16:80]))
    return _int4(
        stored, (d * scales.float()).flatten(1), minimum=(-d_min * minima.float()).flatten(1)
    )


def _iq4(packed: Tensor) -> Tensor:
    """Stored INT8 values of bytes of two codes: all low halves, then all high ones."""
    codes = torch.tensor([code + 128 for code in _IQ4], dtype=torch.uint8, device=packed.device)
    return codes[torch.cat(_halves(packed), -1).int()]


def _iq4_nl(blocks: Blocks) -> PackedWeight:
    return _int8(_iq4(blocks[..., 2:]), _half(blocks, 0))


def _iq4_xs(blocks: Blocks) -> PackedWeight:
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4, None] >> shift & 3).flatten(-2)
    low = torch.stack(_halves(blocks[..., 4:8]), -1).flatten(-2)
    scales = (low | high << 4).float() - 32
    scale = (_half(blocks, 0).float()[..., None] * scales).flatten(1)
    return _int8(_iq4(torch.unflatten(blocks[..., 8:], -1, (8, 16))).flatten(1, 2), scale)


_DECODERS: dict[str, Callable[[Blocks], PackedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
