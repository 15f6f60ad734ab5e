"""Memory that was freed, given back to the system: `--memory` is about what is resident.

glibc keeps freed blocks of up to 32 MB for later, which after a stage with many matrices are
hundreds of MiB that nobody asked for. Mapping every large block afresh would give all back at once,
but then two fifths of the time went to the pages (measured); so it is told at the end of a stage.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Returns what is free, where the C library is glibc."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """malloc_trim(3); None where the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
