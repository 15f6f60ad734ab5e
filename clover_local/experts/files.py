"""The weight files of a checkpoint, kept open, and reads from anywhere in them.

Reads and no memory map: what has been read stays in the system's page cache just the same, but of a
file that was truncated behind our back, or of a bad disk, a read reports what a touched page of a
map would end the process for.
"""

import os
import weakref
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Protocol

from clover_local.errors import CheckpointError


class Reader(Protocol):
    """Fills memory from a file, for several threads at once."""

    def read(self, path: Path, start: int, *, into: memoryview) -> None:
        """Fills `into` with the bytes of the file from `start`.

        Raises:
            CheckpointError: the file ends before, or the system reports an error.
        """


class Files:
    """Open files, until nobody has this object any more; any thread may read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Opens the files.

        Raises:
            CheckpointError: one cannot be opened.
        """
        self._files: dict[Path, FileIO] = {}
        self._lock = Lock()
        weakref.finalize(self, _close, self._files)
        for path in paths:
            try:
                self._files[path] = path.open("rb", buffering=0)
            except OSError as error:
                raise _unreadable(path, error) from None

    def read(self, path: Path, start: int, *, into: memoryview) -> None:
        """See `Reader`."""
        try:
            while into:
                got = self._read(self._files[path], start, into)
                if not got:
                    raise CheckpointError(
                        f"{path} ends too early, it was changed while in use: download it again"
                    )
                into, start = into[got:], start + got
        except OSError as error:
            raise _unreadable(path, error) from None

    def _read(self, file: FileIO, start: int, into: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [into], start)
        with self._lock:  # Windows: a file has one position for all threads
            file.seek(start)
            return file.readinto(into)


def _close(files: dict[Path, FileIO]) -> None:
    for file in files.values():
        file.close()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}): check the file, its permissions and the disk"
    )
