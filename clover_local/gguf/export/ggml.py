"""ggml's own quantizers, through the wheel `libggml-python` (extra `gguf`), by ctypes.

A call lets other Python threads run, so rows of several experts are quantized at once.
"""

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clover_local.gguf.types import TensorType

PACKAGE = "libggml"
_LIBRARIES = {"win32": "ggml-base.dll", "darwin": "libggml-base.dylib"}


class Ggml:
    """The library in memory."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._quantize = self._library.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        self._quantize.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]

    def encode(
        self,
        values: NDArray[np.float32],
        kind: TensorType,
        *,
        importance: NDArray[np.float32] | None,
    ) -> NDArray[np.uint8]:
        """[rows, columns] to [rows, bytes]; `importance` [columns] weighs the columns' errors."""
        rows, columns = values.shape
        values = np.ascontiguousarray(values)
        encoded = np.zeros((rows, kind.row_bytes(columns)), np.uint8)
        weights = None
        if importance is not None:
            if importance.shape != (columns,):
                raise ValueError(f"importance {importance.shape} for {columns} columns")
            importance = np.ascontiguousarray(importance)
            weights = importance.ctypes.data
        written = self._quantize(
            kind.number, values.ctypes.data, encoded.ctypes.data, 0, rows, columns, weights
        )
        if written != encoded.nbytes:
            raise ValueError(f"{kind.name}: {written} bytes written, expected {encoded.nbytes}")
        return encoded


@cache
def find_ggml() -> Ggml | None:
    """The library; None where its wheel is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return None
    name = _LIBRARIES.get(sys.platform, "libggml-base.so")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob(name)):
            return Ggml(path)
    return None
