"""A GGUF model in one file or in several: `NAME-00001-of-00003.gguf` and so on.

Metadata are those of the first file; each file says which of how many it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clover_local.errors import CheckpointError
from clover_local.gguf.container import (
    GgufFile,
    GgufTensor,
    MetaValue,
    damaged,
    read_file,
    shown,
)

SPLIT_NUMBER = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"

_MOST_FILES = 99_999  # of five digits
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufModel:
    """The files of one model: metadata of the first, tensors of all."""

    files: tuple[GgufFile, ...]

    @property
    def path(self) -> Path:
        """The file, or the first one."""
        return self.files[0].path

    @property
    def metadata(self) -> Mapping[str, MetaValue]:
        """Keys and values."""
        return self.files[0].metadata

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        """All tensors by name."""
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def read_gguf(path: Path) -> GgufModel:
    """The headers of a model's file, or of all its files where `path` is the first of several.

    Raises:
        CheckpointError: a bad file, another one than the first, or files that do not belong
            together.
    """
    first = read_file(path)
    count = first.metadata.get(SPLIT_COUNT, 1)
    if count in (0, 1):
        return GgufModel((first,))
    if type(count) is not int or not 1 < count <= _MOST_FILES:
        raise damaged(path, f"{SPLIT_COUNT} is {count!r:.20}")
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or count != int(name["count"]):
        raise CheckpointError(
            f"{path} is one of {count} files ({SPLIT_COUNT}), which its name does not say: "
            f"name it NAME-00001-of-{count:05}.gguf"
        )

    def other(number: int) -> Path:
        return path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf")

    if int(name["number"]) != 1:
        raise CheckpointError(f"{path} is not the first of its files: pass {other(1).name}")
    files = [first]
    for number in range(2, count + 1):
        if not other(number).is_file():
            raise CheckpointError(f"{other(number)} is absent: download all {count} files")
        files.append(read_file(other(number)))
    _require_one_model(files)
    return GgufModel(tuple(files))


def _require_one_model(files: list[GgufFile]) -> None:
    homes: dict[str, str] = {}
    for number, file in enumerate(files):
        says, of = file.metadata.get(SPLIT_NUMBER), file.metadata.get(SPLIT_COUNT)
        if says != number or of != len(files):
            raise damaged(
                file.path,
                f"it says that it is file {says!r:.20} of {of!r:.20}, counted from 0, and its name "
                f"{number} of {len(files)}",
            )
        for tensor in file.tensors:
            home = homes.setdefault(tensor.name, file.path.name)
            if home != file.path.name:
                raise damaged(file.path, f"{shown(tensor.name)} is in {home} too")
    says = files[0].metadata.get(SPLIT_TENSORS)
    if says is not None and says != len(homes):
        raise damaged(
            files[0].path, f"{says!r:.20} tensors by {SPLIT_TENSORS}, {len(homes)} in the files"
        )
