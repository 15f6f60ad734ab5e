"""`clover-summary.json`: how many numbers a checkpoint has, in which formats and in how many bytes.

A quantized checkpoint has several hundred thousand tensors, and reading their names takes seconds;
whoever only describes it or plans memory for it reads this. It is made from the headers, and it
names the shards with their sizes, so that one that belongs to other files is noticed.
"""

import os
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from clover_local.checkpoint.packed import PackedFormat, PackedInfo, format_on
from clover_local.checkpoint.parameters import EMBEDDING, HEAD
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.checkpoint.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    ITEM_BYTES,
    VERSION_KEY,
    TensorInfo,
)
from clover_local.errors import ConfigError
from clover_local.files import Reader, as_flag, as_objects, as_size, as_text, read_json_object

SUMMARY_NAME = "clover-summary.json"
_MINIMUM_BYTES = 4
PARTS = ("experts", "trunk", "head", "embedding", "diffusion")


@dataclass(frozen=True)
class Group:
    """Weights of one format; `bytes` with scales, shapes and zero points."""

    format: str  # INT4, INT8, or the dtype of plain tensors
    group_size: int | None
    symmetric: bool
    numbers: int
    bytes: int

    @property
    def label(self) -> str:
        """`INT4 g128`, or a dtype."""
        group = f" g{self.group_size}" if self.group_size else ""
        return f"{self.format}{group}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True)
class RecordSize:
    """So many experts of a layer have records of so many bytes: words and scales."""

    bytes: int
    experts: int


@dataclass(frozen=True)
class ShardSize:
    """A weight file."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Summary:
    """What a checkpoint consists of.

    `trunk` is all that the other parts are not: attention, Gated DeltaNet, shared experts, routers,
    norms. A tied head is the embedding and nothing besides.
    """

    experts: tuple[Group, ...]
    trunk: tuple[Group, ...]
    head: tuple[Group, ...]
    embedding: tuple[Group, ...]
    diffusion: tuple[Group, ...]
    records: tuple[tuple[RecordSize, ...], ...]  # of each layer
    shards: tuple[ShardSize, ...]

    @property
    def parts(self) -> dict[str, tuple[Group, ...]]:
        """The groups of each of `PARTS`."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those of all parts."""
        return tuple(group for groups in self.parts.values() for group in groups)

    @property
    def bits_per_weight(self) -> float:
        """Bits in the files for each number of the model, scales included."""
        return bits_per_weight(self.groups)

    def describes(self, folder: Path) -> bool:
        """Whether the weight files in `folder` are there with the sizes that this names, and the
        index where they are several.
        """
        if len(self.shards) > 1 and not (folder / INDEX_NAME).is_file():
            return False
        paths = [(folder / shard.name, shard.bytes) for shard in self.shards]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def to_json(self) -> dict[str, object]:
        """The object that the file holds."""
        return {
            VERSION_KEY: FORMAT_VERSION,
            "bits_per_weight": round(self.bits_per_weight, 4),
            **asdict(self),
        }


def bits_per_weight(groups: tuple[Group, ...]) -> float:
    """Bits for each number of some groups; 0 for none."""
    numbers = sum(group.numbers for group in groups)
    return 8 * sum(group.bytes for group in groups) / numbers if numbers else 0.0


def summarize(checkpoint: Checkpoint, *, device: str | None = None) -> Summary:
    """Counts what the headers say.

    With a device (`cpu`, `cuda`) matrices in a foreign encoding count as what they become there.
    """
    parts: dict[str, dict[_Format, Counter[str]]] = {part: {} for part in PARTS}
    for placement in checkpoint.placements:
        form = _format(placement, device)
        count = parts[_part(placement)].setdefault(form, Counter())
        count["numbers"] += prod(placement.target.shape)
        count["bytes"] += sum(_bytes(placement, device))
    groups = {
        part: tuple(
            Group(*form, numbers=count["numbers"], bytes=count["bytes"])
            for form, count in sorted(formats.items(), key=lambda item: -item[1]["bytes"])
        )
        for part, formats in parts.items()
    }
    shards = tuple(ShardSize(shard.path.name, shard.nbytes) for shard in checkpoint.shards)
    return Summary(**groups, records=_records(checkpoint, device), shards=shards)


def read_summary(folder: Path) -> Summary | None:
    """The summary in a model's folder; None where there is none.

    Raises:
        ConfigError: unreadable, of a newer format, or with a wrongly typed key.
    """
    path = folder / SUMMARY_NAME
    if not os.path.lexists(path):
        return None
    top = Reader(str(path), read_json_object(path))
    version = top.get(VERSION_KEY, as_size)
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} has the {VERSION_KEY} {version}, this clover-local reads up to "
            f"{FORMAT_VERSION}: install a newer clover-local"
        )

    def objects(key: str) -> list[Reader]:
        return [Reader(f"{path}: {key}", values) for values in top.get(key, as_objects)]

    groups = {
        part: tuple(
            Group(
                format=group.get("format", as_text),
                group_size=group.get("group_size", as_size, None),
                symmetric=group.get("symmetric", as_flag),
                numbers=group.get("numbers", _as_count),
                bytes=group.get("bytes", _as_count),
            )
            for group in objects(part)
        )
        for part in PARTS
    }
    return Summary(
        **groups,
        records=tuple(
            tuple(
                RecordSize(size.get("bytes", _as_count), size.get("experts", _as_count))
                for size in (Reader(f"{path}: records", values) for values in layer)
            )
            for layer in top.get("records", _as_lists)
        ),
        shards=tuple(
            ShardSize(shard.get("name", as_text), shard.get("bytes", _as_count))
            for shard in objects("shards")
        ),
    )


class _Format(NamedTuple):
    format: str
    group_size: int | None
    symmetric: bool


def _format(placement: Placement, device: str | None) -> _Format:
    tensor, layout = placement.tensor, _becomes(placement, device)
    if isinstance(tensor, PackedInfo):
        layout = tensor.format
    elif layout is None:
        return _Format(tensor.dtype, None, True)
    return _Format(f"INT{layout.bits}", layout.group_size, layout.symmetric)


def _becomes(placement: Placement, device: str | None) -> PackedFormat | None:
    """The packed format that a matrix in a foreign encoding has on a device."""
    tensor = placement.tensor
    if device is None or isinstance(tensor, TensorInfo | PackedInfo) or tensor.format is None:
        return None
    return format_on(tensor.format, device)


def _bytes(placement: Placement, device: str | None) -> tuple[int, int]:
    """Those of a record (words and scale, or plain numbers), and what comes besides."""
    tensor = placement.tensor
    if isinstance(tensor, PackedInfo):
        record = tensor.words.nbytes + tensor.scale.nbytes
        return record, tensor.nbytes - record
    layout = _becomes(placement, device)
    if layout is None:
        return tensor.nbytes, 0
    numbers = prod(placement.target.shape)
    groups = numbers // layout.group_size
    scales = groups * ITEM_BYTES[layout.scale_dtype]
    return numbers * layout.bits // 8 + scales, 0 if layout.symmetric else groups * _MINIMUM_BYTES


def _part(placement: Placement) -> str:
    target = placement.target
    if target.kind.fused or target.kind.rows_of:
        return "experts"
    if target.kind.diffusion:
        return "diffusion"
    return {HEAD: "head", EMBEDDING: "embedding"}.get(target.name, "trunk")


def _records(checkpoint: Checkpoint, device: str | None) -> tuple[tuple[RecordSize, ...], ...]:
    """The sizes of each layer's records, largest first."""
    layers: dict[int, Counter[int | None]] = {}  # bytes by expert; None: of all that are fused
    fused_experts = 1
    for placement in checkpoint.placements:
        target = placement.target
        if _part(placement) == "experts":
            layer = int(target.name.split(".")[1])
            nbytes, _ = _bytes(placement, device)
            layers.setdefault(layer, Counter())[target.expert] += nbytes
            fused_experts = target.shape[0] if target.kind.fused else 1
    return tuple(
        tuple(
            RecordSize(nbytes // fused_experts, count * fused_experts)
            for nbytes, count in sorted(Counter(layers[layer].values()).items(), reverse=True)
        )
        for layer in sorted(layers)
    )


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError("an integer of 0 or more")
    return value


def _as_lists(value: Any) -> list[list[dict[str, Any]]]:
    if not isinstance(value, list):
        raise TypeError("a list of lists of objects")
    return [as_objects(item) for item in value]
