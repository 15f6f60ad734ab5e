"""Memory that was freed, given back to the system: `--memory` is about what is resident.

glibc keeps freed blocks of up to 32 MB for later, which after a stage with many matrices are
hundreds of MiB that nobody asked for. Mapping every large block afresh would give all back at once,
but then two fifths of the time went to the pages (measured); so it is told at the end of a stage.
"""

import ctypes
from collections.abc import Callable


def give_back() -> None:
    """Returns what is free, where the C library is glibc."""
    if _trim is not None:
        _trim(0)


_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
