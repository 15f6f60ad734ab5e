"""All experts of a checkpoint as records in its files, read one at a time into memory.

The host's copy of the experts is the files, which the system keeps in memory as far as there is
room (`files.py`). Of an expert whose parts follow each other in the file as in the record, a record
is one read; parts that lie apart are gathered. Plain numbers become those of the model's dtype, and
integer zero points minima, while they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from clover_local.checkpoint.encoded import Encoded
from clover_local.checkpoint.packed import format_on
from clover_local.checkpoint.parameters import DOWN, GATE_UP
from clover_local.checkpoint.placements import Checkpoint, Placement
from clover_local.checkpoint.read import TORCH_DTYPES
from clover_local.checkpoint.regroup import for_device
from clover_local.checkpoint.shards import TensorInfo
from clover_local.checkpoint.zero_points import packed_minimum
from clover_local.config import ModelConfig
from clover_local.experts.files import Files, Reader
from clover_local.experts.record import (
    ExpertFormat,
    Field,
    Layout,
    Matrix,
    joined_layout,
    kernel_layout,
)
from clover_local.kernels import dispatch
from clover_local.kernels.gpu.experts.record import MatrixFormat
from clover_local.kernels.packed import PackedWeight

Key = tuple[int, int]
"""Layer and expert."""


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a file: rows of a tensor."""

    path: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _ZeroPoints:
    """What minima are made of."""

    zero_points: _Bytes
    scale: _Bytes
    bits: int


@dataclass(frozen=True)
class _Run:
    """Bytes of a file that are bytes of the record, from `at`."""

    path: Path
    start: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class _Decoded:
    """Fields of a matrix in a foreign encoding, each from its row in what that decodes to."""

    tensor: Encoded
    fields: tuple[tuple[Field, int], ...]


@dataclass(frozen=True)
class _Made:
    """A field whose bytes are not those of the file."""

    field: Field
    source: _Bytes | _ZeroPoints


class ExpertStore:
    """The records of all experts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        reader: Reader | None = None,
    ) -> None:
        """Looks at the headers only; `reader` reads the files, `Files` if not given.

        Args:
            device: where the records are going to run, which decides their layout.
            dtype: of matrices that are not packed.

        Raises:
            CheckpointError: the tensors do not fit `config`, or a file cannot be opened.
        """
        checkpoint.require_fit()
        self.num_layers, self.num_experts = config.num_hidden_layers, config.num_experts
        self.hidden = config.hidden_size
        self._inner = config.moe_intermediate_size
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._reader = reader or Files(shard.path for shard in checkpoint.shards)
        self._number = {shard.path: number for number, shard in enumerate(checkpoint.shards)}
        self._steps: dict[Key, tuple[_Run | _Made | _Decoded, ...]] = {}
        self._device = torch.device(device)
        on_gpu = dispatch.on_gpu(torch.empty(0, device=device))
        self._layouts = [self._layer_layouts(layer, on_gpu) for layer in range(self.num_layers)]

    @property
    def keys(self) -> list[Key]:
        """Every (layer, expert), the lowest numbers of all layers first."""
        return [(layer, n) for n in range(self.num_experts) for layer in range(self.num_layers)]

    @property
    def record_bytes(self) -> tuple[int, ...]:
        """Per layer the bytes of a slot that can hold any of its experts."""
        return tuple(max(layout.nbytes for layout in layouts) for layouts in self._layouts)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(layout.nbytes for layouts in self._layouts for layout in layouts)

    def layouts(self, layer: int) -> Sequence[Layout]:
        """The layout of each expert of a layer; equal ones are one object."""
        return self._layouts[layer]

    def place_in_files(self, layer: int, expert: int) -> tuple[int, int]:
        """For sorting: experts in this order are read from front to back."""
        first = self._layouts[layer][expert].fields[0]
        placement, row = self._placements(layer, expert)[first.matrix]
        if isinstance(placement.tensor, Encoded):
            return self._number[placement.tensor.shard], placement.tensor.start
        source = _source(placement, row, first)
        assert isinstance(source, _Bytes)  # values are in the files as they are
        return self._number[source.path], source.start

    def read(self, layer: int, expert: int, *, into: Tensor) -> None:
        """Reads a record.

        Args:
            layer: of the model.
            expert: of the layer.
            into: [at least the layout's bytes] uint8, in host memory.

        Raises:
            CheckpointError: a file ended too early or cannot be read; `into` may be half written.
        """
        memory = into.numpy().data
        for step in self._steps_of(layer, expert):
            if isinstance(step, _Run):
                part = memory[step.at : step.at + step.nbytes]
                self._reader.read(step.path, step.start, into=part)
            elif isinstance(step, _Decoded):
                self._decode(step, into)
            elif isinstance(step.source, _Bytes):
                step.field.of(into).copy_(self._content(step.source).view(step.field.shape))
            else:
                zero_points = self._content(step.source.zero_points)
                scale = self._content(step.source.scale)
                minimum = packed_minimum(zero_points, scale, bits=step.source.bits)
                step.field.of(into).copy_(minimum)

    def _decode(self, step: _Decoded, into: Tensor) -> None:
        tensor = step.tensor
        content = torch.empty(tensor.nbytes, dtype=torch.uint8)
        self._reader.read(tensor.shard, tensor.start, into=content.numpy().data)
        weight = tensor.decode(content)
        if isinstance(weight, PackedWeight):
            weight = for_device(weight, self._device)
            parts = {"values": weight.data, "scale": weight.scale, "minimum": weight.minimum}
        else:
            parts = {"values": weight}
        for field, row in step.fields:
            part = parts[field.part]
            assert part is not None
            field.of(into).copy_(part[row : row + field.shape[0]])

    def _content(self, source: _Bytes) -> Tensor:
        content = torch.empty(source.nbytes, dtype=torch.uint8)
        self._reader.read(source.path, source.start, into=content.numpy().data)
        return content.view(source.dtype).view(source.shape)

    def _layer_layouts(self, layer: int, on_gpu: bool) -> tuple[Layout, ...]:
        formats = [self._format(layer, expert) for expert in range(self.num_experts)]
        made: dict[ExpertFormat, Layout] = {}
        for expert in dict.fromkeys(formats):
            made[expert] = joined_layout(expert)
        if on_gpu and len(made) == 1:  # the kernels run experts of one format
            for expert in made:
                made[expert] = kernel_layout(expert) or made[expert]
        return tuple(made[expert] for expert in formats)

    def _format(self, layer: int, expert: int) -> ExpertFormat:
        placements = self._placements(layer, expert)
        gate_up, down = (self._matrix_format(placements[m][0]) for m in ("gate", "down"))
        return ExpertFormat(self.hidden, self._inner, gate_up, down)

    def _matrix_format(self, placement: Placement) -> MatrixFormat | torch.dtype:
        tensor = placement.tensor
        if isinstance(tensor, TensorInfo) or tensor.format is None:
            return self._dtype
        layout = tensor.format
        if isinstance(tensor, Encoded):
            layout = format_on(layout, self._device.type)
        scale = TORCH_DTYPES[layout.scale_dtype]
        return MatrixFormat(layout.bits, layout.group_size, scale, not layout.symmetric)

    def _fused(self, layer: int) -> bool:
        return (GATE_UP.format(layer=layer), None) in self._checkpoint.parts

    def _placements(self, layer: int, expert: int) -> dict[Matrix, tuple[Placement, int]]:
        """For each matrix the tensors that hold it, and its first row in them."""
        parts = self._checkpoint.parts
        if self._fused(layer):
            (gate_up,) = parts[GATE_UP.format(layer=layer), None]
            (down,) = parts[DOWN.format(layer=layer), None]
            first = 2 * self._inner * expert
            return {
                "gate": (gate_up, first),
                "up": (gate_up, first + self._inner),
                "down": (down, self.hidden * expert),
            }
        gate, *rest = parts[GATE_UP.format(layer=layer), expert]
        up = (rest[0], 0) if rest else (gate, self._inner)
        (down,) = parts[DOWN.format(layer=layer), expert]
        return {"gate": (gate, 0), "up": up, "down": (down, 0)}

    def _steps_of(self, layer: int, expert: int) -> tuple[_Run | _Made | _Decoded, ...]:
        if (layer, expert) not in self._steps:
            placements = self._placements(layer, expert)
            steps: list[_Run | _Made | _Decoded] = []
            encoded: dict[int, _Decoded] = {}
            for field in self._layouts[layer][expert].fields:
                placement, row = placements[field.matrix]
                if isinstance(placement.tensor, Encoded):
                    made = encoded.get(id(placement), _Decoded(placement.tensor, ()))
                    encoded[id(placement)] = replace(made, fields=(*made.fields, (field, row)))
                    continue
                source = _source(placement, row, field)
                if isinstance(source, _ZeroPoints) or source.dtype != field.dtype:
                    steps.append(_Made(field, source))
                else:
                    _append(steps, _Run(source.path, source.start, source.nbytes, field.start))
            self._steps[layer, expert] = (*steps, *encoded.values())
        return self._steps[layer, expert]


def _source(placement: Placement, first_row: int, field: Field) -> _Bytes | _ZeroPoints:
    """Where the numbers of a field come from."""
    tensor = placement.tensor
    if isinstance(tensor, Encoded):
        raise ValueError(f"{tensor.name} is {tensor.dtype}: it has to be decoded")
    if isinstance(tensor, TensorInfo):
        row = field.shape[1] * TORCH_DTYPES[tensor.dtype].itemsize
        start, nbytes = tensor.start + first_row * row, field.shape[0] * row
        return _Bytes(tensor.shard, start, nbytes, TORCH_DTYPES[tensor.dtype], field.shape)
    if field.part == "minimum" and tensor.zero_point is not None:
        return _ZeroPoints(_whole(tensor.zero_point), _whole(tensor.scale), tensor.format.bits)
    parts = {"values": tensor.words, "scale": tensor.scale, "minimum": tensor.minimum}
    part = parts[field.part]
    assert part is not None
    return _whole(part)


def _whole(tensor: TensorInfo) -> _Bytes:
    dtype = TORCH_DTYPES[tensor.dtype]
    return _Bytes(tensor.shard, tensor.start, tensor.nbytes, dtype, tensor.shape)


def _append(steps: list[_Run | _Made | _Decoded], run: _Run) -> None:
    """Adds a run, to the last one where both follow each other in the file and in the record."""
    last = steps[-1] if steps else None
    if (
        isinstance(last, _Run)
        and last.path == run.path
        and last.start + last.nbytes == run.start
        and last.at + last.nbytes == run.at
    ):
        steps[-1] = _Run(last.path, last.start, last.nbytes + run.nbytes, last.at)
    else:
        steps.append(run)
