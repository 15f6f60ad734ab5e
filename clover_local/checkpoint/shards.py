"""Safetensors files on disk: which tensors they hold and where the bytes lie; needs no torch.

Headers are read here and not left to the safetensors package, because `info` and `verify` must look
at files that cannot be loaded, and because its errors name neither the file nor the remedy.

    offset 0   8 bytes   N, the header's length, little-endian
    offset 8   N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [start, end]}, ...}
    offset 8+N           the tensors' bytes, without holes; offsets count from here
"""

import json
import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clover_local.errors import CheckpointError
from clover_local.files import require_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FORMAT_VERSION = 1  # of the checkpoints that `write` makes; a shard says it in its metadata
VERSION_KEY = "clover_format_version"
LONGEST_NAME = 255  # of a file, on every system
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package itself

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it; `start` is its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its size in bytes and its tensors in the order of their bytes."""

    path: Path
    nbytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """Headers of every weight file of a checkpoint, ascending by file name.

    Raises:
        CheckpointError: no weights, a missing or damaged shard, an index that contradicts them, a
            newer format.
    """
    paths, weight_map = find_shards(folder)
    shards = tuple(read_shard(path) for path in paths)
    homes: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            other = homes.setdefault(tensor.name, shard.path.name)
            if other != shard.path.name:
                raise CheckpointError(
                    f"{folder}: {tensor.name} is in both {other} and {shard.path.name}: "
                    "remove the file that does not belong to this checkpoint"
                )
    if weight_map is not None:
        _compare_with_index(folder, homes, weight_map)
    for shard in shards:
        _require_known_version(shard)
    return shards


def find_shards(folder: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """Paths of the weight files, and the index (tensor name to file name) where there is one.

    Raises:
        CheckpointError: no weights, several files without an index, an index that names a missing
            file.
    """
    index = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    if not os.path.lexists(index):
        several = sorted(folder.glob("*.safetensors"))
        paths = (single,) if os.path.lexists(single) else tuple(several)
        if not paths:
            raise CheckpointError(
                f"{folder} holds no .safetensors file: download the weights into this folder"
            )
        if len(paths) > 1:
            raise CheckpointError(
                f"{folder} holds {len(paths)} .safetensors files and no {INDEX_NAME}: "
                "download the index too"
            )
        return paths, None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} names {abbreviated(absent)}, which is not in the folder: "
            "download what is missing"
        )
    if single.is_file() and SINGLE_NAME not in names:
        raise CheckpointError(
            f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, which does not name it: "
            "remove one of the two"
        )
    return tuple(folder / name for name in names), weight_map


def read_shard(path: Path) -> Shard:
    """The header of one safetensors file, checked against the file's size.

    Raises:
        CheckpointError: unreadable, truncated, or not a safetensors file.
    """
    try:
        require_file(path)
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            header, data_start = _read_header(path, file, nbytes)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise _damaged(path, "its __metadata__ is no object of strings")
    tensors = sorted(
        (_tensor_info(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda tensor: (tensor.start, tensor.nbytes),
    )
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            raise _damaged(path, f"the bytes of {tensor.name} do not follow those before them")
        end += tensor.nbytes
    if nbytes < end:
        raise _damaged(path, f"truncated, {nbytes} bytes of {end}")
    if nbytes > end:
        raise _damaged(path, f"{nbytes - end} bytes follow the last tensor")
    return Shard(path, nbytes, tuple(tensors), metadata)


def read_integers(tensors: Iterable[TensorInfo]) -> dict[str, tuple[int, ...]]:
    """The numbers in small tensors of signed integers, by tensor name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    by_path: dict[Path, list[TensorInfo]] = {}
    for tensor in tensors:
        by_path.setdefault(tensor.shard, []).append(tensor)
    numbers: dict[str, tuple[int, ...]] = {}
    for path, ours in by_path.items():
        try:
            with path.open("rb") as file:
                for tensor in ours:
                    file.seek(tensor.start)
                    numbers[tensor.name] = _integers(file.read(tensor.nbytes), tensor.dtype)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): check the file and its permissions"
            ) from None
    return numbers


def _integers(content: bytes, dtype: str) -> tuple[int, ...]:
    size = ITEM_BYTES[dtype]
    return tuple(
        int.from_bytes(content[at : at + size], "little", signed=True)
        for at in range(0, len(content), size)
    )


def abbreviated(items: list[str], *, shown: int = 4) -> str:
    """The first few items and how many follow, for an error of one line."""
    rest = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _require_known_version(shard: Shard) -> None:
    version = shard.metadata.get(VERSION_KEY, str(FORMAT_VERSION))
    if version != str(FORMAT_VERSION):
        raise CheckpointError(
            f"{shard.path} has the {VERSION_KEY} {version}, this clover-local reads up to "
            f"{FORMAT_VERSION}: install a newer clover-local"
        )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({what}): download it again")


def _read_header(path: Path, file: BinaryIO, nbytes: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if nbytes < 8:
        raise _damaged(path, f"truncated, {nbytes} bytes")
    if length > MAX_HEADER_BYTES:
        raise _damaged(
            path, f"its header would be {length} bytes long, so it is no safetensors file"
        )
    if 8 + length > nbytes:
        raise _damaged(
            path, f"truncated, {nbytes} bytes, of which the header would take {8 + length}"
        )
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"unreadable header: {' '.join(str(error).split())}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    return header, 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    values = entry if isinstance(entry, dict) else {}
    dtype = values.get("dtype")
    shape = _sizes(values.get("shape"))
    offsets = _sizes(values.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"unreadable header entry {name}")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {name} has the dtype {dtype}, which this runtime cannot read: "
            f"use a checkpoint in one of {', '.join(ITEM_BYTES)}"
        )
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _damaged(path, f"{name} is {dtype} {list(shape)} in {end - start} bytes")
    return TensorInfo(name, dtype, shape, path, data_start + start, end - start)


def _sizes(values: object) -> tuple[int, ...] | None:
    """`values` as a tuple where it is a list of integers of 0 or more."""
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def _read_index(path: Path) -> dict[str, str]:
    try:
        require_file(path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
    except (ValueError, RecursionError):
        raise _damaged(path, "not JSON") from None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(path, "no weight_map")
    distinct = {repr(name): name for name in weight_map.values()}  # a few, of many entries
    for name in distinct.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
            or len(name) > LONGEST_NAME
        ):
            raise _damaged(path, f"{reprlib.repr(name)} is no name of a .safetensors file")
    return weight_map


def _compare_with_index(folder: Path, homes: dict[str, str], weight_map: dict[str, str]) -> None:
    omitted = sorted(homes.keys() - weight_map.keys())
    absent = sorted(weight_map.keys() - homes.keys())
    moved = sorted(
        name for name in homes.keys() & weight_map.keys() if homes[name] != weight_map[name]
    )
    complaints = [
        f"{verb} {abbreviated(names)}"
        for verb, names in (("omits", omitted), ("misplaces", moved), ("names the absent", absent))
        if names
    ]
    if complaints:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} {', '.join(complaints)}: "
            "download the index and the shards again"
        )
