"""Where a result grows: DEST and its work folder, under a lock, so that any stop can be continued.

    DEST/.quantize/lock            held as long as a run works here
    DEST/.quantize/manifest.json   what is made from what
    DEST/.quantize/output/         finished files: shards, and at the end all others
    DEST/.quantize/layers/         a report for each finished layer: its mark
    DEST/.quantize/rows/           hidden states between layers, scratch
    DEST/.quantize/complete        there once the output is: only renaming is left

At the end the output is renamed into DEST, config.json last: a folder with a config.json is
complete. A stop at any moment leaves a state that the next run tells from the others.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clover_local.config import UNFINISHED_NAME
from clover_local.errors import CheckpointError
from clover_local.files import read_json_object, sync_folder
from clover_local.quant.pipeline.manifest import MADE_FROM, Manifest, difference, parse_manifest
from clover_local.quant.pipeline.source import CONFIG_NAME

REPORT_NAME = "quantization_report.json"

_ANOTHER = "use another folder, or delete this one"


class WorkFolder:
    """The destination of one run."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.root = destination / UNFINISHED_NAME
        self.output = self.root / "output"
        self.layers = self.root / "layers"
        self.rows = self.root / "rows"
        self.manifest = self.root / "manifest.json"
        self.complete = self.root / "complete"

    def check_foreign(self) -> None:
        """Checks, without a manifest, that the destination is not somebody else's.

        Raises:
            CheckpointError: a file, another checkpoint, or other files are here.
        """
        if not os.path.lexists(self.destination):
            return
        if not self.destination.is_dir():
            raise CheckpointError(f"{self.destination} is no folder: use another one")
        names = {path.name for path in self.destination.iterdir()}
        if CONFIG_NAME in names and REPORT_NAME not in names:
            raise CheckpointError(f"{self.destination} holds another checkpoint: {_ANOTHER}")
        if CONFIG_NAME not in names and names - {UNFINISHED_NAME} and not self.manifest.is_file():
            other = min(names - {UNFINISHED_NAME})
            raise CheckpointError(
                f"{self.destination} holds other files ({other}): use another folder"
            )

    def is_finished(self, manifest: Manifest) -> bool:
        """Whether this result is complete here already.

        Raises:
            CheckpointError: something else is here: another checkpoint, another run's result.
        """
        if not os.path.lexists(self.destination / CONFIG_NAME):
            return False
        report = self.destination / REPORT_NAME
        values = read_json_object(report).get(MADE_FROM)
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.destination} holds another checkpoint: {_ANOTHER}")
        self._require_same(parse_manifest(values, str(report)), manifest)
        return True

    def check_unfinished(self, manifest: Manifest) -> None:
        """Checks that the unfinished work here, if there is any, is this run's own.

        Raises:
            CheckpointError: it was begun from another source, or with other arguments.
        """
        if not self.manifest.is_file():
            return
        values = read_json_object(self.manifest)
        self._require_same(parse_manifest(values, str(self.manifest)), manifest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folders and holds the lock.

        Raises:
            CheckpointError: another process works here, or the folder cannot be written.
        """
        lock = self.root / "lock"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with lock.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever finished in the meantime has removed the file that is locked here.
                if not os.path.exists(lock) or not os.path.samestat(
                    os.fstat(file.fileno()), lock.stat()
                ):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                for folder in (self.output, self.layers, self.rows):
                    folder.mkdir(exist_ok=True)
                yield
        except BlockingIOError:
            raise CheckpointError(
                f"another process is quantizing into {self.destination}: wait for it, "
                "or use another folder"
            ) from None

    def require_room(self, needed: int) -> None:
        """Checks that the disk has room for what is missing of `needed` bytes.

        Raises:
            CheckpointError: it has not.
        """
        have = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.root).free
        if free < needed - have:
            raise CheckpointError(
                f"{self.destination} needs about {needed - have} bytes more, and its disk has "
                f"{free} free: make room, or use a folder on another disk"
            )

    def finish(self) -> None:
        """Renames the complete output into the destination, config.json last."""
        for path in sorted(self.output.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            if path.name == CONFIG_NAME:
                sync_folder(self.destination)
            path.rename(self.destination / path.name)
        sync_folder(self.destination)
        shutil.rmtree(self.root)

    def clear(self) -> None:
        """Removes what a stop right behind the last rename has left of the work folder.

        Raises:
            CheckpointError: another process works here.
        """
        if os.path.lexists(self.root):
            with self.locked():
                shutil.rmtree(self.root)

    def _require_same(self, before: Manifest, now: Manifest) -> None:
        what = difference(before, now)
        if what is not None:
            raise CheckpointError(f"{self.destination} was {what}: {_ANOTHER}")


def check_apart(source: Path, destination: Path) -> None:
    """Checks that neither folder lies in the other.

    Raises:
        CheckpointError: one does, or they are one.
    """
    a, b = source.resolve(), destination.resolve()
    if a == b:
        raise CheckpointError(f"{destination} is the source itself: use another folder")
    if a in b.parents:
        raise CheckpointError(f"{destination} lies inside the source {source}: use another folder")
    if b in a.parents:
        raise CheckpointError(f"the source {source} lies inside {destination}: use another folder")
