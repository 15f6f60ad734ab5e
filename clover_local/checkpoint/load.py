"""Loads the tensors of a checkpoint, once, from a memory map of its files.

On the CPU a packed matrix stays a view of the map, and so does a plain tensor that already has the
wanted dtype; any other is converted on its own, so that no second copy of the model exists at any
time. Plain experts that are apart on disk are stacked in place. Where a map is not wanted, since
a file that is cut while it is mapped ends the process, the tensors are read one by one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clover_local.checkpoint.encoded import Encoded
from clover_local.checkpoint.packed import PackedInfo
from clover_local.checkpoint.parameters import DOWN, EMBEDDING, GATE_UP, HEAD
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.checkpoint.read import (
    TORCH_DTYPES,
    ExpertWeights,
    joined,
    packed_weight,
    read_into,
)
from clover_local.checkpoint.regroup import for_device
from clover_local.checkpoint.shards import TensorInfo
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.kernels.packed import PackedWeight, Weight

CACHE_LINE = 64


@dataclass(frozen=True)
class LoadedParameters:
    """A model's weights: `parameters` by name without prefix, the experts of each layer apart.

    Linear weights are [out, in]; `conv1d.weight` is [C, 4] and `conv_right_weight` [C, 3].
    `lm_head.weight` is always there: with tied embeddings it is the embedding itself.
    """

    parameters: dict[str, Weight]
    experts: tuple[ExpertWeights, ...]


def load_parameters(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    routed_experts: bool = True,
    on_host: Collection[str] = (),
    mapped: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedParameters:
    """Loads every parameter to `device`: float32 where `PARAMETERS` says so, `dtype` elsewhere.

    Packed matrices stay packed, whatever `dtype` is; on a GPU those of groups too small for its
    kernels become INT8 in larger ones, rounded.

    Args:
        routed_experts: without them `experts` is empty.
        on_host: parameters that stay in host memory, by name.
        mapped: whether parameters may be views of the files.
        on_progress: called after each parameter, or each matrix of an expert, with bytes read so
            far and bytes in all.

    Raises:
        CheckpointError: the tensors do not fit `config` (raised before anything is read), or a file
            cannot be read.
    """
    checkpoint.require_fit()
    maps = _Maps() if mapped else _Reads()
    parameters: dict[str, Weight] = {}
    experts = _Experts(config.num_experts, torch.device(device), dtype)
    chosen = {
        key: parts
        for key, parts in checkpoint.parts.items()
        if routed_experts or not (key[1] is not None or parts[0].target.kind.fused)
    }
    total = sum(part.tensor.nbytes for parts in chosen.values() for part in parts)
    done = 0
    for (name, expert), parts in chosen.items():
        weight = joined([maps.weight(part) for part in parts])
        kind = parts[0].target.kind
        if expert is not None:
            experts.add(name, expert, weight=weight)
        elif isinstance(weight, PackedWeight):
            fitting = for_device(weight, torch.device(device))
            parameters[name] = fitting if name in on_host else fitting.to(device)
        elif kind.fused:
            experts.add_all(name, weight)
        else:
            wanted = torch.float32 if kind.float32 else dtype
            where = "cpu" if name in on_host else device
            parameters[name] = weight.to(device=where, dtype=wanted)
        done += sum(part.tensor.nbytes for part in parts)
        on_progress(done, total)
    parameters.setdefault(HEAD, parameters[EMBEDDING])
    layers = range(config.num_hidden_layers if routed_experts else 0)
    return LoadedParameters(parameters, tuple(experts.take(layer) for layer in layers))


class _Experts:
    """The routed experts: plain ones become one tensor a layer, packed ones a list."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self._count = count
        self._device = device
        self._dtype = dtype
        self._stacked: dict[str, Tensor] = {}  # [E, rows, columns]
        self._packed: dict[str, dict[int, PackedWeight]] = {}

    def add(self, name: str, expert: int, *, weight: Weight) -> None:
        """Takes over an expert's part of the parameter `name`."""
        if isinstance(weight, PackedWeight):
            ours = for_device(weight, self._device).to(self._device)
            self._packed.setdefault(name, {})[expert] = ours
            return
        if name not in self._stacked:
            shape = (self._count, *weight.shape)
            self._stacked[name] = torch.empty(shape, device=self._device, dtype=self._dtype)
        self._stacked[name][expert].copy_(weight)

    def add_all(self, name: str, weight: Tensor) -> None:
        """Takes over all experts' parts of the parameter `name`."""
        self._stacked[name] = weight.to(device=self._device, dtype=self._dtype)

    def take(self, layer: int) -> ExpertWeights:
        """All experts of a layer."""
        gate_up, down = GATE_UP.format(layer=layer), DOWN.format(layer=layer)
        return ExpertWeights(self._take(gate_up), self._take(down))

    def _take(self, name: str) -> Tensor | Sequence[Weight]:
        """All experts' parts of the parameter `name`."""
        if name not in self._packed:
            return self._stacked.pop(name)
        weights: dict[int, Weight] = dict(enumerate(self._stacked.pop(name, ())))
        weights.update(self._packed.pop(name))
        return [weights[expert] for expert in range(self._count)]


class _Maps:
    """Memory maps of the shards that are being read; views keep a map alive."""

    def __init__(self) -> None:
        self._maps: dict[Path, Tensor] = {}

    def weight(self, placement: Placement) -> Weight:
        """The tensor or packed matrix of a placement, in the dtype of the file."""
        tensor = placement.tensor
        if tensor.shard not in self._maps:
            self._maps.clear()  # shards come one after the other
        if isinstance(tensor, PackedInfo):
            return packed_weight(tensor, self._view)
        if not isinstance(tensor, TensorInfo):
            return tensor.decode(self._bytes(tensor))
        return self._view(tensor).view(placement.target.shape)

    def _bytes(self, tensor: TensorInfo | Encoded) -> Tensor:
        path = tensor.shard
        if path not in self._maps:
            self._maps[path] = _map(path)
        content = self._maps[path][tensor.start : tensor.start + tensor.nbytes]
        if len(content) < tensor.nbytes:
            raise CheckpointError(f"{path} ends too early: download it again")
        return content

    def _view(self, tensor: TensorInfo) -> Tensor:
        content = self._bytes(tensor)
        dtype = TORCH_DTYPES[tensor.dtype]
        if content.storage_offset() % dtype.itemsize:
            content = content.clone()  # a file whose tensors are not aligned
        return content.view(dtype).view(tensor.shape)


class _Reads(_Maps):
    """Memory of its own for each tensor."""

    def _bytes(self, tensor: TensorInfo | Encoded) -> Tensor:
        lead = tensor.start % CACHE_LINE  # as in a map: MKL's rounding depends on it
        content = torch.empty(lead + tensor.nbytes, dtype=torch.uint8)[lead:]
        read_into(content.numpy().data, tensor.shard, tensor.start)
        return content


def _map(path: Path) -> Tensor:
    """The bytes of a file. Private: nothing that is done to them reaches the file."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({reason}): download it again") from None
