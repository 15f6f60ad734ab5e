"""What an exception becomes for the user: one line with the remedy, a traceback only on demand."""

import os
import traceback

from clover_local.cli import console
from clover_local.errors import CloverError


def report(error: BaseException) -> None:
    """Says on stderr what went wrong; with `CLOVER_DEBUG=1` where."""
    if os.environ.get("CLOVER_DEBUG"):
        traceback.print_exception(error)
    else:
        console.error(_explain(error))


def _explain(error: BaseException) -> str:
    """One sentence on an exception that ended a command or an answer."""
    if isinstance(error, CloverError):
        notes = ", ".join(getattr(error, "__notes__", ()))
        return f"{error} ({notes})" if notes else str(error)
    if _is_out_of_memory(error):
        return "out of memory: close other programs, shorten the conversation, or lower --context"
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}: check the path, its permissions and the space on the disk"
    kind = type(error).__name__
    return f"unexpected {kind}: {error} (a fault of clover-local; CLOVER_DEBUG=1 shows where)"


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's own, torch's on a GPU (by name: torch may not be loaded), torch's on the CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )
