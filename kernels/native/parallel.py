"""Runs a compiled function in all threads of torch's own pool."""

import ctypes
from functools import cache
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")
Call = ctypes.Array[ctypes.c_int64]

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(function: int, call: Call, *, tasks: int) -> None:
    """Calls the `void f(int64 *call)` at address `function` in up to `tasks` threads at once.

    The threads are those of torch, as many as `torch.get_num_threads()`; they share `call`, whose
    fields say what is left to do.
    """
    threads = min(torch.get_num_threads(), tasks)
    openmp = _openmp() if threads > 1 else None
    if openmp is None:
        _Function(function)(ctypes.addressof(call))
    else:
        # (function, its argument, threads, flags)
        openmp.GOMP_parallel(function, ctypes.addressof(call), threads, 0)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, so that both share one pool; None: it has none."""
    for line in MAPS.read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libgomp"):
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint,
                ctypes.c_uint,
            ]
            library.GOMP_parallel.restype = None
            return library
    return None
