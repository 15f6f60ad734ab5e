"""The tensors of a GGUF file matched with its config: a `Checkpoint` as of safetensors; no torch.

Plain tensors that need no change are placed as they are. Experts are placed one by one, though the
file has them as one tensor, so that one can be read without the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from clover_local.checkpoint.parameters import DOWN, GATE_UP, PARAMETERS, Target, kind_of
from clover_local.checkpoint.placements import Checkpoint, Placement, complaints, notes_on
from clover_local.checkpoint.shards import Shard, TensorInfo
from clover_local.config import ModelConfig
from clover_local.gguf.container import GgufFile, GgufTensor
from clover_local.gguf.diffusion import array_places
from clover_local.gguf.load.matrix import GgufMatrix
from clover_local.gguf.splits import GgufModel
from clover_local.gguf.tensors import (
    Heads,
    NamedEntry,
    Value,
    fused_gate_up,
    named_entries,
)
from clover_local.gguf.types import CLOVER_MOE, DECODED, PLAIN_TYPES

_OTHER_PARTS = ("nextn.", "mtp.", "rope_freqs")  # of names: what a causal pass does not use


@dataclass
class _Found:
    """What the names, shapes and types say."""

    placements: list[Placement] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def match_tensors(
    model: GgufModel, config: ModelConfig, *, diffusion: GgufFile | None
) -> Checkpoint:
    """Every parameter's place in the files; what does not fit is in `problems`.

    Args:
        diffusion: the file whose metadata hold the diffusion parameters, if there is one.
    """
    tensors = model.tensors
    found = _Found()
    for named in named_entries(config):
        _place(named, tensors, config, found)
    unknown = [name for name in tensors if name not in found.used]
    own = model.metadata.get("general.architecture") == CLOVER_MOE
    other = [
        name for name in unknown if _is_other_part(name, config) or (own and not _is_bias(name))
    ]
    surplus = sorted({*unknown} - {*other})
    places: list[TensorInfo] = []
    if diffusion is not None:
        for name, place in array_places(diffusion, config).items():
            target = Target(name, kind_of(name), place.shape)
            found.placements.append(Placement(place, target))
            places.append(place)
    files = {file.path: number for number, file in enumerate(model.files)}
    found.placements.sort(key=lambda each: (files.get(each.tensor.shard, -1), each.tensor.start))
    shards = tuple(_shard(file) for file in model.files)
    return Checkpoint(
        folder=model.path,
        prefix="",
        shards=shards,
        tensors={info.name: info for shard in shards for info in shard.tensors}
        | {place.name: place for place in places},
        placements=tuple(found.placements),
        has_diffusion=diffusion is not None,
        notes=notes_on(other, has_diffusion=diffusion is not None),
        problems=complaints(
            ("missing", found.missing),
            ("surplus", surplus),
            ("misshapen", found.misshapen),
            (f"of a type that is none of {', '.join(DECODED)}", found.unread),
        ),
    )


def _place(
    named: NamedEntry, tensors: Mapping[str, GgufTensor], config: ModelConfig, found: _Found
) -> None:
    tensor, shape = tensors.get(named.name), named.shape
    if tensor is None and named.parameter == GATE_UP.format(layer=named.layer):
        name, shape = fused_gate_up(config, named.layer or 0)
        tensor = tensors.get(name)
        if name in found.used:
            return  # with the gate
    if tensor is None:
        found.missing.append(named.name)
        return
    found.used.add(tensor.name)
    if _squeezed(tensor.shape) != _squeezed(shape):
        found.misshapen.append(f"{tensor.name} is {list(tensor.shape)}, expected {list(shape)}")
    elif tensor.type.name not in DECODED:
        found.unread.append(f"{tensor.name} is {tensor.type.name}")
    elif named.entry.of_experts:
        unlike = _unlike(named, tensors)
        found.placements += _experts(named, tensor, shape, config, unlike=unlike)
    else:
        kind = PARAMETERS[named.entry.parameter]
        target = Target(named.parameter, kind, kind.shape(config))
        whole = _matrix(named, tensor, target.shape, config, plain=not kind.packable)
        found.placements.append(Placement(whole, target))


def _experts(
    named: NamedEntry,
    tensor: GgufTensor,
    shape: tuple[int, ...],
    config: ModelConfig,
    *,
    unlike: bool,
) -> Iterator[Placement]:
    kind = PARAMETERS[named.entry.parameter]
    first_row = kind.first_row(config)
    nbytes = tensor.nbytes // config.num_experts
    for expert in range(config.num_experts):
        part = replace(tensor, start=tensor.start + expert * nbytes, nbytes=nbytes)
        matrix = _matrix(named, part, shape[1:], config, plain=False, unlike=unlike)
        yield Placement(matrix, Target(named.parameter, kind, shape[1:], expert, first_row))


def _matrix(
    named: NamedEntry,
    tensor: GgufTensor,
    shape: tuple[int, ...],
    config: ModelConfig,
    *,
    plain: bool,
    unlike: bool = False,
) -> TensorInfo | GgufMatrix:
    entry = named.entry
    order = entry.order(config)
    if tensor.type.name in PLAIN_TYPES and entry.value is Value.SAME and order is None:
        return TensorInfo(
            tensor.name, tensor.type.name, shape, tensor.path, tensor.start, tensor.nbytes
        )
    return GgufMatrix(
        tensor.name,
        tensor.type,
        tensor.path,
        tensor.start,
        tensor.nbytes,
        shape,
        entry.value,
        Heads.NONE if order is None else entry.heads,
        order,
        plain=plain,
        unlike=unlike,
    )


def _unlike(named: NamedEntry, tensors: Mapping[str, GgufTensor]) -> bool:
    """Whether the other half of the experts' gate and up has another type."""
    if named.parameter == DOWN.format(layer=named.layer):
        return False
    pair = [f"blk.{named.layer}.ffn_{half}_exps.weight" for half in ("gate", "up")]
    return len({tensors[name].type for name in pair if name in tensors}) > 1


def _is_other_part(name: str, config: ModelConfig) -> bool:
    pieces = name.split(".")
    behind = pieces[0] == "blk" and pieces[1:2] and pieces[1].isdigit()
    if behind and int(pieces[1][:9]) >= config.num_hidden_layers:
        return True  # layers that draft tokens
    return any(part in name for part in _OTHER_PARTS)


def _is_bias(name: str) -> bool:
    """Files of Clover's own architecture may hold tensors of its makers that no causal pass uses;
    a bias would be used."""
    return name.endswith(".bias")


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _shard(file: GgufFile) -> Shard:
    infos = [
        TensorInfo(each.name, each.type.name, each.shape, each.path, each.start, each.nbytes)
        for each in file.tensors
    ]
    infos.sort(key=lambda info: info.start)
    return Shard(file.path, file.nbytes, tuple(infos), {})
