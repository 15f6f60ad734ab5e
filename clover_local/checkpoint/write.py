"""Writes the files of a checkpoint: whole or not at all, and the same bytes every time.

Not the safetensors package's `save_file`, because that sorts tensors by dtype and name; here the
bytes come in the order given, so that one expert is one run of bytes that one read fetches:

    header, filled with spaces to a multiple of 256
    gate words, up words, gate scale, up scale, down words, down scale    of expert 0
    ... of expert 1, 2, ...
    the other matrices of the layer, words and scale; norms and other small tensors
    the shapes of all packed matrices, then zero points or minima
"""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from clover_local.checkpoint.packed import MINIMUM, SCALE, SHAPE, WORDS, ZERO_POINT
from clover_local.checkpoint.read import TORCH_DTYPES
from clover_local.checkpoint.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    VERSION_KEY,
    Shard,
)
from clover_local.checkpoint.zero_points import zero_points_of
from clover_local.errors import CheckpointError
from clover_local.files import json_bytes, replacing
from clover_local.kernels.packed import PackedWeight, Weight, same_format

ALIGNMENT = 256
LARGEST_SHARD = 5 * 10**9  # bytes

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor and its name in the file."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class PackedTensors:
    """The tensors of one or more matrices: `main` in this order, `last` behind all others."""

    main: tuple[NamedTensor, ...]
    last: tuple[NamedTensor, ...] = ()


def packed_tensors(name: str, weight: PackedWeight) -> PackedTensors:
    """How the matrix `name` (without `.weight`) is stored; integer zero points where exact."""
    weight_name = f"{name}.weight"
    last = [NamedTensor(weight_name + SHAPE, torch.tensor(weight.shape))]
    zero_points = zero_points_of(weight)
    if zero_points is not None:
        last.append(NamedTensor(weight_name + ZERO_POINT, zero_points))
    elif weight.minimum is not None:
        last.append(NamedTensor(weight_name + MINIMUM, weight.minimum))
    return PackedTensors(
        (
            NamedTensor(weight_name + WORDS, weight.data),
            NamedTensor(weight_name + SCALE, weight.scale),
        ),
        tuple(last),
    )


def expert_tensors(prefix: str, gate: Weight, *, up: Weight, down: Weight) -> PackedTensors:
    """One expert as one record; `prefix` is as `model.layers.3.mlp.experts.7.`.

    Raises:
        ValueError: gate and up are not of one format, so that no reader could stack them.
    """
    if not same_format(gate, up):
        raise ValueError(f"gate and up of {prefix} have different formats")
    main: list[NamedTensor] = []
    last: list[NamedTensor] = []
    for matrices in ({"gate_proj": gate, "up_proj": up}, {"down_proj": down}):
        parts = [weight_tensors(prefix + name, weight) for name, weight in matrices.items()]
        for same in zip(*(part.main for part in parts), strict=True):  # all words, then all scales
            main += same
        last += [tensor for part in parts for tensor in part.last]
    return PackedTensors(tuple(main), tuple(last))


def weight_tensors(name: str, weight: Weight) -> PackedTensors:
    """As `packed_tensors`, for a matrix that may also be plain: `name.weight`."""
    if isinstance(weight, PackedWeight):
        return packed_tensors(name, weight)
    return PackedTensors((NamedTensor(f"{name}.weight", weight),))


def shard_name(number: int, count: int) -> str:
    """The name of shard `number` (from 1) of `count`."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def write_shard(
    path: Path, tensors: Sequence[NamedTensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes `tensors` in this order, with the format's version and `metadata`.

    Raises:
        ValueError: a name that occurs twice, a dtype that no reader knows, more than 5 GB.
        CheckpointError: the file cannot be written; nothing of it is left.
    """
    header = _header(
        tensors, {"format": "pt", VERSION_KEY: str(FORMAT_VERSION), **(metadata or {})}
    )
    nbytes = len(header) + sum(named.tensor.nbytes for named in tensors)
    if nbytes > LARGEST_SHARD:
        raise ValueError(f"{path.name} would have {nbytes} bytes, a shard at most {LARGEST_SHARD}")
    with _replacing(path, nbytes) as file:
        file.write(header)
        for named in tensors:
            content = named.tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            file.write(content.numpy().data)


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of the shards in `folder`, which `read_shard` has read.

    Raises:
        CheckpointError: the file cannot be written; nothing of it is left.
    """
    homes = {tensor.name: shard.path.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": homes})


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Writes a JSON object, indented, keys in the order given.

    Raises:
        CheckpointError: the file cannot be written; nothing of it is left.
    """
    write_file(path, json_bytes(values))


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all.

    Raises:
        CheckpointError: the file cannot be written; nothing of it is left.
    """
    with _replacing(path, len(data)) as file:
        file.write(data)


def _header(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, filled with spaces so that the data start at a multiple of 256."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for named in tensors:
        tensor = named.tensor
        if named.name in entries:
            raise ValueError(f"the tensor {named.name} is there twice")
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{named.name} is {tensor.dtype}, written are {', '.join(_NAMES.values())}"
            )
        entries[named.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _replacing(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """As `files.replacing`, for a file of so many bytes."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path, nbytes, error) from None


def unwritable(path: Path, nbytes: int, error: OSError) -> CheckpointError:
    """The error for a file of so many bytes that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room(path, nbytes)
    return CheckpointError(
        f"{path} cannot be written ({error.strerror}): check the folder and its permissions"
    )


def no_room(path: Path, nbytes: int) -> CheckpointError:
    """The error for a file of so many bytes on a disk that is too full."""
    return CheckpointError(
        f"{path.parent} has no room for the {nbytes} bytes of {path.name}: "
        "free some disk space, then run the same command again"
    )
