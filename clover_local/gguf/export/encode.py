"""From float32 rows to the bytes of a tensor type."""

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from clover_local.errors import SettingsError
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.export.plain import (
    encode_bf16,
    encode_f16,
    encode_f32,
    encode_q4_0,
    encode_q8_0,
)
from clover_local.gguf.types import PLAIN_TYPES, TensorType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Encode = Callable[[Floats, TensorType, Floats | None], Bytes]
"""Rows [R, columns], their type, and the importance of the columns, to bytes [R, row bytes]."""

EXTRA = "pip install 'clover-local[gguf]'"
_OWN = {
    "F32": encode_f32,
    "F16": encode_f16,
    "BF16": encode_bf16,
    "Q8_0": encode_q8_0,
    "Q4_0": encode_q4_0,
}


def find_encoder(kinds: Collection[TensorType], *, has_imatrix: bool) -> Encode:
    """An encoder for all of `kinds`.

    Raises:
        SettingsError: a type or the imatrix needs ggml's library, which is not installed.
    """
    ggml = find_ggml()
    if ggml is None:
        beyond = sorted({kind.name for kind in kinds} - _OWN.keys())
        if beyond:
            raise SettingsError(
                f"{', '.join(beyond)} tensors need ggml's library: {EXTRA}, or use --type Q8_0"
            )
        if has_imatrix:
            raise SettingsError(f"--imatrix needs ggml's library: {EXTRA}, or leave it out")
    quantize = None if ggml is None else ggml.encode

    def encode(values: Floats, kind: TensorType, importance: Floats | None) -> Bytes:
        if quantize is None or kind.name in PLAIN_TYPES:
            return _OWN[kind.name](values)
        return quantize(values, kind, importance=importance)

    return encode
