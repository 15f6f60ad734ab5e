"""What a result is made from: hashes of the source's files, the recipe, the calibration text.

Two runs whose manifests are equal make equal files. An unfinished run's manifest lies in its work
folder and decides whether it may be continued; the report of a finished one holds it too.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from clover_local.errors import CheckpointError
from clover_local.files import Reader, as_integer, as_object, as_text
from clover_local.quant.profiles import Recipe

VERSION = 1
"""Of the work folder and of the manifest in the report."""
MADE_FROM = "made_from"
"""The report's key for the manifest."""

_HASH_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """All that decides the bytes of a result."""

    source: Mapping[str, str]  # file name to sha256
    arguments: Mapping[str, Any]  # the recipe's fields; of an import, only the method's name
    calibration: str  # sha256 of the calibration text; "" where none is read
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """As an object for a file."""
        return asdict(self)


def parse_manifest(values: Mapping[str, Any], source: str) -> Manifest:
    """The opposite of `to_json`; `source` names the file in errors.

    Raises:
        ConfigError: a missing or wrongly typed key.
    """
    reader = Reader(source, values)
    return Manifest(
        source=reader.get("source", as_object),
        arguments=reader.get("arguments", as_object),
        calibration=reader.get("calibration", as_text),
        version=reader.get("version", as_integer),
    )


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe as it stands in a manifest."""
    return {field.name: getattr(recipe, field.name) for field in fields(recipe)}


def difference(before: Manifest, now: Manifest) -> str | None:
    """What differs, for a sentence: the first thing that does; None where nothing does."""
    if before.version != now.version:
        return f"made by another version of clover-local (format {before.version})"
    for name in sorted(before.arguments.keys() | now.arguments.keys()):
        old, new = before.arguments.get(name), now.arguments.get(name)
        if old != new:
            return f"made with {name} {_shown(old)}, not {_shown(new)}"
    if before.source != now.source:
        names = sorted(before.source.keys() | now.source.keys())
        changed = [name for name in names if before.source.get(name) != now.source.get(name)]
        return f"made from another source ({changed[0]} differs)"
    if before.calibration != now.calibration:
        return "made with another calibration text"
    return None


def hash_files(
    paths: Sequence[Path], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, str]:
    """sha256 of each file by name.

    Args:
        on_progress: called with bytes read and bytes in all.

    Raises:
        CheckpointError: a file cannot be read.
    """
    hashes = {}
    done = 0
    try:
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_HASH_BYTES):
                    digest.update(chunk)
                    done += len(chunk)
                    on_progress(done, total)
            hashes[path.name] = digest.hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read ({error.strerror}): check disk and permissions"
        ) from None
    return hashes


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
