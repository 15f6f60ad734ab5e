"""Hidden states [R, D] of all calibration rows in a file, so that memory does not grow with them.

Rows are float32, those of one sequence after the other, commit rows first. Files between two layers
are written beside their name and renamed, so that a name stands for a whole file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clover_local.errors import CheckpointError
from clover_local.files import sync_folder

ITEM_BYTES = 4


class RowFile:
    """Rows [R, D] float32 on disk, read and written in runs of rows."""

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.width = width
        self.row_bytes = width * ITEM_BYTES

    @property
    def rows(self) -> int:
        """R."""
        return self.path.stat().st_size // self.row_bytes

    def read(self, start: int, end: int) -> Tensor:
        """Rows `start` to `end` in fresh memory.

        Raises:
            CheckpointError: the file is shorter, or cannot be read.
        """
        rows = torch.empty(end - start, self.width)
        view = rows.flatten().view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start * self.row_bytes)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise self._damaged(error.strerror or "unreadable") from None
        if view:
            raise self._damaged("too short")
        return rows

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged ({how}): delete the destination and start again"
        )

    @contextmanager
    def writer(self, *, durable: bool) -> Iterator["RowWriter"]:
        """Takes all rows in order; the file has its name once they are all written.

        Args:
            durable: whether the file has to outlast a power cut.

        Raises:
            CheckpointError: the disk is full, or cannot be written.
        """
        temporary = self.path.with_suffix(".part")
        try:
            with temporary.open("wb", buffering=0) as file:
                yield RowWriter(file.fileno())
                if durable:
                    os.fsync(file.fileno())
            temporary.rename(self.path)
            if durable:
                sync_folder(self.path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self.path.parent} cannot be written ({error.strerror}): make room on the disk "
                "and run the same command again"
            ) from None

    def remove(self) -> None:
        """Deletes the file."""
        self.path.unlink(missing_ok=True)


class RowWriter:
    """Appends rows to an open file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def append(self, rows: Tensor) -> None:
        """Writes rows [N, D], any device and float dtype."""
        content = rows.to("cpu", torch.float32).contiguous().flatten().view(torch.uint8)
        view = content.numpy().data
        while view:
            view = view[os.write(self.descriptor, view) :]


@dataclass(frozen=True)
class RowFiles:
    """The rows before a layer, as the quantized layers before make them and as the source does.

    Only methods that quantize against the source's rows write those.
    """

    quantized: RowFile
    source: RowFile

    @classmethod
    def before(cls, layer: int, folder: Path, *, width: int) -> "RowFiles":
        """Those before `layer`, in `folder`."""
        names = (f"before-{layer:05}.rows", f"source-before-{layer:05}.rows")
        return cls(*(RowFile(folder / name, width) for name in names))

    @property
    def paths(self) -> set[Path]:
        """Where they are, whether or not they were written."""
        return {self.quantized.path, self.source.path}

    def remove(self) -> None:
        """Deletes the files."""
        self.quantized.remove()
        self.source.remove()
