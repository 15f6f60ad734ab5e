"""Bytes of quantized rows: ours, ggml's, and second implementations of others."""

import numpy as np
import pytest
from numpy.typing import NDArray

from clover_local.errors import SettingsError
from clover_local.gguf.export import encode, plain
from clover_local.gguf.export.encode import find_encoder
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.types import TYPES

Floats = NDArray[np.float32]


def rows(columns: int = 512, *, seed: int = 3) -> Floats:
    """Rows with outliers, ties, zeros, a block of zeros, tiny and large numbers."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((24, columns)).astype(np.float32)
    values[0] = 0
    values[1, :32] = 0
    values[2] = np.round(values[2])
    values[3] *= np.float32(1e-9)
    values[4] *= np.float32(3e3)
    values[5, ::7] *= np.float32(50)
    values[6] = np.arange(columns) % 64 - 31.5  # halves: every rounding is a tie
    return values


needs_ggml = pytest.mark.skipif(find_ggml() is None, reason="libggml-python is not installed")


@needs_ggml
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_our_own_bytes_are_those_of_ggml(name: str) -> None:
    ggml = find_ggml()
    assert ggml is not None
    own = {"Q8_0": plain.encode_q8_0, "Q4_0": plain.encode_q4_0}[name]
    for seed in range(5):
        values = rows(seed=seed)
        theirs = ggml.encode(values, TYPES[name], importance=None)
        assert np.array_equal(own(values), theirs)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "F16", "BF16", "F32"])
def test_our_own_bytes_are_those_of_gguf_py(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    own = {
        "Q8_0": plain.encode_q8_0,
        "Q4_0": plain.encode_q4_0,
        "F16": plain.encode_f16,
        "BF16": plain.encode_bf16,
        "F32": plain.encode_f32,
    }[name]
    theirs = gguf.quants.quantize(rows(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(own(rows()), np.ascontiguousarray(theirs).view(np.uint8))


@needs_ggml
@pytest.mark.parametrize(
    "name",
    ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"],
)
def test_ggmls_bytes_are_those_of_libgguf(name: str) -> None:
    libgguf = pytest.importorskip("libgguf")
    gguf = pytest.importorskip("gguf")
    ggml = find_ggml()
    assert ggml is not None
    theirs = libgguf.quantize_rows(rows(), gguf.GGMLQuantizationType[name])
    ours = ggml.encode(rows(), TYPES[name], importance=None)
    assert np.array_equal(ours, np.ascontiguousarray(theirs).view(np.uint8).reshape(ours.shape))


@needs_ggml
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "IQ4_XS", "Q3_K", "Q6_K"])
def test_importance_lowers_the_weighted_error(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    ggml = find_ggml()
    assert ggml is not None
    generator = np.random.default_rng(1)
    values = generator.standard_normal((64, 512)).astype(np.float32)
    importance = np.exp(3 * generator.standard_normal(512)).astype(np.float32)

    def error(weights: Floats | None) -> float:
        encoded = ggml.encode(values, TYPES[name], importance=weights)
        decoded = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[name])
        return float((importance * (decoded - values) ** 2).sum())

    assert error(importance) < 0.95 * error(None)


def test_without_ggml_plain_types_work_and_others_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode, "find_ggml", lambda: None)
    own = find_encoder([TYPES[name] for name in ("F32", "Q8_0", "Q4_0")], has_imatrix=False)
    assert np.array_equal(own(rows(), TYPES["Q8_0"], None), plain.encode_q8_0(rows()))
    with pytest.raises(SettingsError, match=r"Q4_K, Q6_K tensors need .*pip install 'clover-local"):
        find_encoder([TYPES["Q6_K"], TYPES["Q4_K"], TYPES["F32"]], has_imatrix=False)
    with pytest.raises(SettingsError, match="--imatrix needs"):
        find_encoder([TYPES["Q8_0"]], has_imatrix=True)


@needs_ggml
def test_wrong_calls_are_refused() -> None:
    ggml = find_ggml()
    assert ggml is not None
    with pytest.raises(ValueError, match="40 columns, Q4_K has blocks of 256"):
        ggml.encode(np.zeros((2, 40), np.float32), TYPES["Q4_K"], importance=None)
    with pytest.raises(ValueError, match=r"importance \(5,\) for 256 columns"):
        values = np.zeros((2, 256), np.float32)
        ggml.encode(values, TYPES["Q4_K"], importance=np.zeros(5, np.float32))
