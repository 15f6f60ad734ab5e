"""Blocks as packed weights: to the last bit what ggml's numbers stand for."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clover_local.checkpoint.read import TORCH_DTYPES
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.export.plain import encode_q4_0, encode_q8_0
from clover_local.gguf.load.decode import decode
from clover_local.gguf.types import DECODED, PACKED_FORMATS, PLAIN_TYPES, TYPES
from clover_local.kernels.int4 import unpack
from clover_local.kernels.packed import PackedWeight


def random_blocks(name: str, rows: int = 7, columns: int = 768) -> NDArray[np.uint8]:
    """Every bit pattern may come, but for scales that are no numbers."""
    kind = TYPES[name]
    generator = np.random.default_rng(11)
    blocks = generator.integers(0, 256, (rows, columns // kind.block, kind.nbytes), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(name, (0, 2))
    if name in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"):
        halves = (0,)
    for at in halves:
        scale = generator.standard_normal(blocks.shape[:2]).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_any_blocks_decode_to_the_numbers_of_gguf_py(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = random_blocks(name)
    weight = decode(torch.from_numpy(blocks.reshape(-1)), TYPES[name], (7, 768))
    assert isinstance(weight, PackedWeight)
    found = (weight.bits, weight.group_size, weight.minimum is None, weight.scale.dtype)
    layout = PACKED_FORMATS[name]
    scale = TORCH_DTYPES[layout.scale_dtype]
    assert found == (layout.bits, layout.group_size, layout.symmetric, scale)
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    ours = weight.dequantize().numpy()
    # Both round d * q + m to float32 once or twice: the last bit of the larger may differ.
    exact = weight.minimum is None
    limit = 0 if exact else 2**-23 * np.abs(theirs).max()
    assert np.abs(ours - theirs).max() <= limit


@pytest.mark.skipif(find_ggml() is None, reason="libggml-python is not installed")
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_quantized_rows_come_back_near_what_they_were(name: str) -> None:
    ggml = find_ggml()
    assert ggml is not None
    values = np.random.default_rng(2).standard_normal((5, 512)).astype(np.float32)
    encoded = ggml.encode(values, TYPES[name], importance=None)
    weight = decode(torch.from_numpy(encoded.reshape(-1)), TYPES[name], (5, 512))
    assert isinstance(weight, PackedWeight)
    error = np.sqrt(np.mean((weight.dequantize().numpy() - values) ** 2))
    assert error < {"Q2_K": 0.35, "Q3_K": 0.18}.get(name, 0.11)


def test_integers_and_scales_of_q8_0_and_q4_0_are_the_files() -> None:
    values = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    for bits, encoded in ((8, encode_q8_0(values)), (4, encode_q4_0(values))):
        kind = TYPES["Q8_0" if bits == 8 else "Q4_0"]
        weight = decode(torch.from_numpy(encoded.reshape(-1)), kind, (3, 64))
        assert isinstance(weight, PackedWeight)
        blocks = encoded.reshape(3, 2, kind.nbytes)
        scales = blocks[..., :2].copy().view("<f2")[..., 0]
        assert np.array_equal(weight.scale.numpy(), scales)
        stored = blocks[..., 2:]
        if bits == 4:
            integers = np.concatenate([stored & 15, stored >> 4], -1).astype(np.int8) - 8
        else:
            integers = stored.view(np.int8)
        assert np.array_equal(unpack(weight.data, bits).numpy(), integers.reshape(3, 64))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_views(name: str) -> None:
    content = torch.arange(6 * TYPES[name].nbytes, dtype=torch.uint8)
    weight = decode(content, TYPES[name], (2, 3))
    assert isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == content.data_ptr()
    odd = torch.zeros(6 * TYPES[name].nbytes + 1, dtype=torch.uint8)[1:]
    assert decode(odd, TYPES[name], (2, 3)).shape == (2, 3)


def test_other_types_are_refused_by_name() -> None:
    assert set(DECODED) == {*PACKED_FORMATS, *PLAIN_TYPES}
    with pytest.raises(ValueError, match="MXFP4 is none of F32"):
        decode(torch.zeros(17, dtype=torch.uint8), TYPES["MXFP4"], (1, 32))
