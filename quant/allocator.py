"""Memory that was freed, given back to the system: `--memory` is about what is resident.

glibc keeps freed blocks of up to 32 MB for later, which after a stage with many matrices are
hundreds of MiB that nobody asked for. Mapping every large block afresh gives all back at once, but
then two fifths of the time go to the pages (measured): that is for limits which leave no room, and
otherwise the library is told at the end of a stage.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

LARGE = 1 << 20  # bytes of a block
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def give_back() -> None:
    """Returns what is free, where the C library is glibc."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def give_back_at_once() -> None:
    """Returns large blocks when they are freed, from now on, where the C library is glibc."""
    change = _function("mallopt")
    if change is not None:
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            change(option, LARGE)


@cache
def _function(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has no such one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
