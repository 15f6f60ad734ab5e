"""A large file that is written piece by piece, survives `kill -9`, and appears whole or not at all.

    .NAME.partial   the bytes so far
    .NAME.journal   which file it will be (hash of its header), and how many tensors are on disk

The journal moves on only after the bytes before have been synced, so what it counts is there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from clover_local.checkpoint.write import no_room, unwritable, write_file
from clover_local.errors import CheckpointError
from clover_local.gguf.container import DEFAULT_ALIGNMENT
from clover_local.gguf.write import Layout

SYNC_BYTES = 256 << 20  # at most so much is written again after a stop


class PartialFile:
    """The unfinished file. `finished` counts tensors that need not be made again."""

    def __init__(self, path: Path, layout: Layout, file: BinaryIO, finished: int) -> None:
        self._path = path
        self._layout = layout
        self._file = file
        self._unsynced = 0
        self._key = _key(layout)
        self.finished = finished

    def start_tensor(self, number: int) -> None:
        """Fills up to the first byte of tensor `number`."""
        self._file.write(bytes(self._layout.starts[number] - self._file.tell()))

    def write(self, content: memoryview) -> None:
        """The next bytes of the current tensor."""
        self._file.write(content)

    def end_tensor(self, number: int) -> None:
        """Remembers that tensor `number` is whole; on disk only now and then."""
        self.finished = number + 1
        self._unsynced += self._file.tell() - self._layout.starts[number]
        if self._unsynced >= SYNC_BYTES:
            self._sync()

    def finish(self) -> None:
        """Fills up to the end and gives the file its name."""
        self._file.write(bytes(self._layout.nbytes - self._file.tell()))
        self._sync()
        _partial(self._path).replace(self._path)
        _journal(self._path).unlink(missing_ok=True)

    def keep(self) -> None:
        """Remembers what is finished, before a stop that leaves time for it."""
        if self.finished:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        state = {"header": self._key, "tensors": self.finished}
        write_file(_journal(self._path), json.dumps(state).encode())
        self._unsynced = 0


@contextmanager
def open_partial(path: Path, layout: Layout) -> Iterator[PartialFile]:
    """The file at `path` as far as an earlier call has come with the same header, else a new one.

    Raises:
        CheckpointError: no room, or the folder cannot be written.
    """
    finished = _finished(path, layout)
    end = len(layout.header)
    if finished:
        following = layout.starts[finished:]
        end = following[0] if following else layout.nbytes
    try:
        _require_room(path, layout.nbytes - end)
        # Not "wb": that would empty what another process is writing, before the lock says so.
        with _partial(path).open("r+b" if finished else "ab+") as file:
            _lock(file, path)
            if not finished:
                file.truncate(0)
                _journal(path).unlink(missing_ok=True)
                file.write(layout.header)
            file.truncate(end)  # fills with zeros what padding was not written yet
            file.seek(end)
            partial = PartialFile(path, layout, file, finished)
            try:
                yield partial
            except KeyboardInterrupt:
                partial.keep()
                raise
    except OSError as error:
        raise unwritable(path, layout.nbytes, error) from None


def _lock(file: BinaryIO, path: Path) -> None:
    """Keeps a second export of the same file away, as long as this process has it open."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{path} is being written by another process: wait until it has ended"
        ) from None


def is_finished(path: Path, layout: Layout) -> bool:
    """Whether `path` is already the file that this header begins.

    Raises:
        CheckpointError: it is another one.
    """
    if not os.path.lexists(path):
        return False
    if path.is_file() and path.stat().st_size == layout.nbytes:
        with path.open("rb") as file:
            if file.read(len(layout.header)) == layout.header:
                return True
    raise CheckpointError(f"{path} exists and is another file: remove it or choose another name")


def _finished(path: Path, layout: Layout) -> int:
    try:
        state = json.loads(_journal(path).read_bytes())
        finished = state["tensors"] if state["header"] == _key(layout) else 0
        end = (*layout.starts, layout.nbytes)[finished]
        whole = _partial(path).stat().st_size > end - DEFAULT_ALIGNMENT  # padding may be absent
        return finished if whole and type(finished) is int and finished > 0 else 0
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0  # none, or none that makes sense: begin anew


def _require_room(path: Path, nbytes: int) -> None:
    if shutil.disk_usage(path.parent).free < nbytes:
        raise no_room(path, nbytes)


def _key(layout: Layout) -> str:
    return hashlib.sha256(layout.header).hexdigest()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _journal(path: Path) -> Path:
    return path.with_name(f".{path.name}.journal")
