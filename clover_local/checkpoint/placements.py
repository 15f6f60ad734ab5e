"""Which tensor of a checkpoint becomes which parameter, and whether all fit; needs no torch.

Everything is decided from the headers (and the few numbers of `weight_shape`), before any weight is
read: a wrong checkpoint of 69 GB is refused in a second, with every complaint at once.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

from clover_local.checkpoint.encoded import Encoded
from clover_local.checkpoint.packed import (
    FLOAT_DTYPES,
    PARTS,
    WORDS,
    Misfit,
    PackedFormat,
    PackedInfo,
    match_packed,
)
from clover_local.checkpoint.parameters import EMBEDDING, EXPERT, HEAD, PREFIXES, Target, targets
from clover_local.checkpoint.shards import (
    Shard,
    TensorInfo,
    abbreviated,
    read_integers,
    read_shards,
)
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError

QUANT_METHOD = "compressed-tensors"
QUANT_FORMAT = "pack-quantized"
IMPORTED_METHODS = ("gptq", "awq")
FOREIGN_FAMILIES = ("mtp.", "visual.", "model.visual.")


@dataclass(frozen=True)
class Placement:
    """One tensor, or one packed matrix, of the files and the place where it goes."""

    tensor: TensorInfo | PackedInfo | Encoded
    target: Target


class Placed(Protocol):
    """Anything that goes to a place."""

    @property
    def target(self) -> Target: ...


P = TypeVar("P", bound=Placed)


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model, matched with its config.

    `placements` are in the order of the bytes on disk. Tensor names begin with `prefix`, but for
    the head's. `problems` is empty when everything fits; `notes` are for the user. Without
    diffusion parameters only the mode `ar` works.
    """

    folder: Path
    prefix: str
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    placements: tuple[Placement, ...]
    has_diffusion: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def require_fit(self) -> None:
        """Raises CheckpointError with every problem, if there is one."""
        if self.problems:
            raise CheckpointError(
                f"{self.folder}: the weights do not fit the config: {'; '.join(self.problems)}: "
                "use the files of one and the same checkpoint"
            )

    @cached_property
    def parts(self) -> Mapping[tuple[str, int | None], tuple[Placement, ...]]:
        """What a parameter (or one expert's part of it) is made of, by its first rows."""
        return by_parameter(self.placements)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all that is placed."""
        return sum(placement.tensor.nbytes for placement in self.placements)


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Reads the headers of all weight files and matches them with `config`; reads no weights.

    Raises:
        CheckpointError: missing or damaged files, a newer format, a foreign quantization. Tensors
            that do not fit are no error here: they are `problems`.
    """
    require_readable(folder, config)
    shards = read_shards(folder)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    foreign = foreign_names(tensors)
    prefix = find_prefix(tensors)
    first_expert = prefix + EXPERT.format(layer=0, expert=0)
    per_expert = any(name.startswith(first_expert) for name in tensors)
    wanted = wanted_targets(config, tensors, prefix=prefix, per_expert=per_expert)
    has_diffusion = any(target.kind.diffusion for target in wanted.values())
    if config.tie_word_embeddings and HEAD not in tensors and HEAD + WORDS not in tensors:
        del wanted[HEAD]
    packed, misfits = _match_packed(wanted, tensors)
    placements = tuple(_placements(shards, wanted, packed))
    matched = packed.keys() | misfits.keys()
    used = {name + part for name in matched for part in PARTS}
    return Checkpoint(
        folder=folder,
        prefix=prefix,
        shards=shards,
        tensors=tensors,
        placements=placements,
        has_diffusion=has_diffusion,
        notes=notes_on(foreign, has_diffusion=has_diffusion),
        problems=complaints(
            ("missing", [name for name in wanted if name not in tensors and name not in matched]),
            ("surplus", sorted(tensors.keys() - wanted.keys() - used - set(foreign))),
            ("misshapen", [*_misshapen(placements), *misfits.values()]),
            (
                "packed in another way than the other half of the expert's gate and up",
                _unlike_neighbours(placements),
            ),
        ),
    )


def by_parameter(placed: Iterable[P]) -> dict[tuple[str, int | None], tuple[P, ...]]:
    """What a parameter (or one expert's part of it) is made of, by its first rows."""
    found: dict[tuple[str, int | None], list[P]] = {}
    for part in placed:
        found.setdefault((part.target.name, part.target.expert), []).append(part)
    return {
        key: tuple(sorted(parts, key=lambda part: part.target.first_row))
        for key, parts in found.items()
    }


def complaints(*kinds: tuple[str, list[str]]) -> tuple[str, ...]:
    """How many names there are of each kind that has any, and the first of them."""
    return tuple(f"{len(names)} {what} ({abbreviated(names)})" for what, names in kinds if names)


def foreign_names(names: Iterable[str]) -> list[str]:
    """Those of parts that this runtime does not have."""
    return [name for name in names if name.startswith(FOREIGN_FAMILIES)]


def find_prefix(names: Container[str]) -> str:
    """What the tensor names of a checkpoint begin with, but for the head's."""
    return next((p for p in PREFIXES if p + EMBEDDING in names), PREFIXES[-1])


def wanted_targets(
    config: ModelConfig, names: Container[str], *, prefix: str, per_expert: bool
) -> dict[str, Target]:
    """As `targets`, without the diffusion parameters where none is among `names`."""
    wanted = dict(targets(config, prefix=prefix, per_expert=per_expert))
    if any(target.kind.diffusion for name, target in wanted.items() if name in names):
        return wanted
    return {name: target for name, target in wanted.items() if not target.kind.diffusion}


def notes_on(foreign: list[str], *, has_diffusion: bool) -> tuple[str, ...]:
    """What the user should know of weights that fit."""
    notes = []
    if foreign:
        notes.append(f"skipped {len(foreign)} tensors of other parts ({abbreviated(foreign)})")
    if not has_diffusion:
        notes.append("no diffusion parameters in these weights: only the mode ar works")
    return tuple(notes)


def require_readable(folder: Path, config: ModelConfig) -> None:
    """Refuses weights that another method has quantized, before their names look like nonsense.

    Raises:
        CheckpointError: a method or format that the runtime does not read.
    """
    method, layout = config.quant_method, config.quant_format
    if method is None or (method == QUANT_METHOD and layout in (QUANT_FORMAT, None)):
        return
    named = f"{method}'s format {layout}" if method == QUANT_METHOD else method
    remedy = (
        f"import them with `clover-local quantize {folder} DESTINATION`"
        if method in IMPORTED_METHODS
        else f"use the unquantized checkpoint, or one of {QUANT_METHOD}'s format {QUANT_FORMAT}"
    )
    raise CheckpointError(f"{folder}: the weights are quantized by {named}: {remedy}")


def _match_packed(
    wanted: Mapping[str, Target], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, PackedInfo], dict[str, str]]:
    """The packed matrices by their unquantized name, and what is wrong with others."""
    packed: dict[str, PackedInfo] = {}
    misfits: dict[str, str] = {}
    for name, target in wanted.items():
        if not target.kind.packable or name + WORDS not in tensors:
            continue
        if name in tensors:
            misfits[name] = f"{name} is there a second time as {name}{WORDS}"
            continue
        try:
            packed[name] = match_packed(name, tensors, shape=target.shape)
        except Misfit as misfit:
            misfits[name] = str(misfit)
    numbers = read_integers(info.shape for info in packed.values())
    for name, info in list(packed.items()):
        says, shape = numbers[info.shape.name], wanted[name].shape
        if says != shape:
            misfits[name] = f"{info.shape.name} says {list(says)}, expected {list(shape)}"
            del packed[name]
    return packed, misfits


def _placements(
    shards: tuple[Shard, ...], wanted: Mapping[str, Target], packed: Mapping[str, PackedInfo]
) -> Iterator[Placement]:
    for shard in shards:
        for tensor in shard.tensors:
            name = tensor.name.removesuffix(WORDS)
            if tensor.name in wanted:
                yield Placement(tensor, wanted[tensor.name])
            elif tensor.name == name + WORDS and name in packed:
                yield Placement(packed[name], wanted[name])


def _misshapen(placements: Iterable[Placement]) -> Iterator[str]:
    """What is wrong with the tensors that are not packed."""
    for placement in placements:
        tensor, target = placement.tensor, placement.target
        if not isinstance(tensor, TensorInfo):
            continue
        if tensor.dtype not in FLOAT_DTYPES:
            yield f"{tensor.name} is {tensor.dtype}, expected {' or '.join(FLOAT_DTYPES)}"
        elif tensor.shape not in target.shapes_on_disk:
            expected = " or ".join(str(list(shape)) for shape in target.shapes_on_disk)
            yield f"{tensor.name} is {list(tensor.shape)}, expected {expected}"


def _unlike_neighbours(placements: Iterable[Placement]) -> list[str]:
    """Rows of one expert's matrix that cannot be stacked: gate and up have one format."""
    formats: dict[tuple[str, int], PackedFormat | None] = {}
    unlike = []
    for placement in placements:
        tensor, target = placement.tensor, placement.target
        if target.expert is not None:
            layout = tensor.format if isinstance(tensor, PackedInfo) else None
            if formats.setdefault((target.name, target.expert), layout) != layout:
                unlike.append(tensor.name)
    return unlike
