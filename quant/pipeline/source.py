"""The checkpoint to be quantized or imported, read part by part; no NaN gets past here.

Unquantized weights are quantized; those that GPTQ, AWQ or compressed-tensors has quantized are
taken over as they are. What this program itself has made is refused: nothing could be gained.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clover_local.checkpoint.packed import FLOAT_DTYPES
from clover_local.checkpoint.parameters import DOWN, GATE_UP, PREFIXES
from clover_local.checkpoint.read import ExpertWeights, read_experts, read_layer, read_outer
from clover_local.checkpoint.shards import VERSION_KEY, Shard, TensorInfo, read_shards
from clover_local.config import ModelConfig, read_generation_config, read_model_config
from clover_local.errors import CheckpointError
from clover_local.files import read_json_object
from clover_local.hub import locate
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.quant.importers.foreign import (
    METHODS,
    ForeignCheckpoint,
    detect,
    open_foreign,
)
from clover_local.quant.memory import PIECE_NUMBERS
from clover_local.session import OpenModel, open_model
from clover_local.tokenizer import Tokenizer

CONFIG_NAME = "config.json"


class Source(ABC):
    """A model whose weights are read in the dtypes of the files.

    Readers raise CheckpointError: a file cannot be read, or a tensor holds NaN or infinity.
    """

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    prefix: str  # of tensor names
    has_diffusion: bool
    notes: tuple[str, ...]

    @property
    @abstractmethod
    def shards(self) -> list[Path]:
        """The weight files."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights that are read."""

    @abstractmethod
    def file_shape(self, name: str) -> tuple[int, ...]:
        """The shape on disk of a plain tensor, by its name without prefix: taps of convolutions
        may have one axis more."""

    def outer(self) -> dict[str, Weight]:
        """Embedding, final norm, head."""
        return self._checked(self._outer())

    def layer(self, layer: int) -> dict[str, Weight]:
        """A layer's parameters but for its routed experts, in the shapes of the config."""
        return self._checked(self._layer(layer))

    def experts(self, layer: int, experts: Sequence[int]) -> list[tuple[Weight, Weight]]:
        """(gate_up [2F, D], down [D, F]) of some experts."""
        weights = self._experts(layer, experts)
        pairs = list(zip(weights.gate_up, weights.down, strict=True))
        for expert, pair in zip(experts, pairs, strict=True):
            for name, weight in zip((GATE_UP, DOWN), pair, strict=True):
                self._require_finite(name.format(layer=layer), weight, expert=expert)
        return pairs

    def _checked(self, parameters: dict[str, Weight]) -> dict[str, Weight]:
        for name, weight in parameters.items():
            self._require_finite(name, weight, expert=None)
        return parameters

    def _require_finite(self, name: str, weight: Weight, *, expert: int | None) -> None:
        parts = (weight.scale, weight.minimum) if isinstance(weight, PackedWeight) else (weight,)
        if not all(part is None or is_finite(part) for part in parts):
            names = " or ".join(self._file_names(name, expert))
            raise CheckpointError(
                f"{self.folder}: {names} holds NaN or infinity: download it again"
            )

    @abstractmethod
    def _outer(self) -> dict[str, Weight]: ...

    @abstractmethod
    def _layer(self, layer: int) -> dict[str, Weight]: ...

    @abstractmethod
    def _experts(self, layer: int, experts: Sequence[int]) -> ExpertWeights: ...

    @abstractmethod
    def _file_names(self, name: str, expert: int | None) -> list[str]:
        """The tensors of floats that a parameter, or an expert's part of it, is made of."""


class PlainSource(Source):
    """Unquantized weights."""

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened
        self.folder = opened.folder
        self.config = opened.config
        self.tokenizer = opened.tokenizer
        self.checkpoint = opened.checkpoint
        self.prefix = opened.checkpoint.prefix or PREFIXES[-1]  # a .gguf file has other names
        self.has_diffusion = opened.checkpoint.has_diffusion
        self.notes = opened.checkpoint.notes

    @property
    def shards(self) -> list[Path]:
        """See `Source.shards`."""
        paths = [shard.path for shard in self.checkpoint.shards]  # a sidecar is none of them
        used = [placement.tensor.shard for placement in self.checkpoint.placements]
        return list(dict.fromkeys([*paths, *used]))

    @property
    def nbytes(self) -> int:
        """See `Source.nbytes`."""
        return self.checkpoint.nbytes

    def file_shape(self, name: str) -> tuple[int, ...]:
        """See `Source.file_shape`."""
        part = self.checkpoint.parts[name, None][0]
        return part.tensor.shape if isinstance(part.tensor, TensorInfo) else part.target.shape

    def _outer(self) -> dict[str, Weight]:
        return read_outer(self.checkpoint, self.config)

    def _layer(self, layer: int) -> dict[str, Weight]:
        return read_layer(self.checkpoint, self.config, layer)

    def _experts(self, layer: int, experts: Sequence[int]) -> ExpertWeights:
        return read_experts(self.checkpoint, self.config, layer, experts)

    def _file_names(self, name: str, expert: int | None) -> list[str]:
        parts = self.checkpoint.parts
        placements = parts.get((name, expert)) or parts[name, None]
        return [placement.tensor.name for placement in placements]


class GgufSource(PlainSource):
    """A .gguf file of quantized weights."""

    method = "gguf"


class ForeignSource(Source):
    """Weights that another program has quantized."""

    def __init__(self, checkpoint: ForeignCheckpoint, tokenizer: Tokenizer) -> None:
        self.folder = checkpoint.folder
        self.config = checkpoint.config
        self.tokenizer = tokenizer
        self.checkpoint = checkpoint
        self.prefix = checkpoint.prefix
        self.has_diffusion = checkpoint.has_diffusion
        self.notes = checkpoint.notes

    @property
    def method(self) -> str:
        """By which method the weights are quantized."""
        return self.checkpoint.method

    @property
    def shards(self) -> list[Path]:
        """See `Source.shards`."""
        return [shard.path for shard in self.checkpoint.shards]

    @property
    def nbytes(self) -> int:
        """See `Source.nbytes`."""
        return sum(shard.nbytes for shard in self.checkpoint.shards)

    def file_shape(self, name: str) -> tuple[int, ...]:
        """See `Source.file_shape`."""
        (part,) = self.checkpoint.parts[name, None]
        source = part.source
        return source.shape if isinstance(source, TensorInfo) else part.target.shape

    def _outer(self) -> dict[str, Weight]:
        return self.checkpoint.read_outer()

    def _layer(self, layer: int) -> dict[str, Weight]:
        return self.checkpoint.read_layer(layer)

    def _experts(self, layer: int, experts: Sequence[int]) -> ExpertWeights:
        return self.checkpoint.read_experts(layer, experts)

    def _file_names(self, name: str, expert: int | None) -> list[str]:
        sources = [part.source for part in self.checkpoint.parts[name, expert]]
        return [
            tensor.name
            for source in sources
            for tensor in ((source,) if isinstance(source, TensorInfo) else source.parts)
            if tensor.dtype in FLOAT_DTYPES
        ]


def open_source(name: str) -> PlainSource | ForeignSource | GgufSource:
    """Finds `name` (`demo`, a folder, or a hub id) and reads all but the weights.

    Raises:
        CloverError: the model cannot be used, or is what this program has made.
    """
    folder = locate(name)
    if folder.is_file():
        return _open_gguf(name)
    config = read_model_config(folder)
    config_json = read_json_object(folder / CONFIG_NAME)
    method = detect(config_json)
    if method in METHODS:
        _require_foreign(folder, read_shards(folder))
        read_generation_config(folder, config)
        foreign = open_foreign(folder, config, config_json=config_json)
        foreign.require_fit()
        tokenizer = Tokenizer.load(folder)
        tokenizer.require_fit(config.vocab_size)
        return ForeignSource(foreign, tokenizer)
    opened = open_model(name)
    _require_foreign(folder, opened.checkpoint.shards)
    return PlainSource(opened)


def _open_gguf(name: str) -> PlainSource:
    opened = open_model(name)
    packed = {tensor.dtype for tensor in opened.checkpoint.tensors.values()} - {*FLOAT_DTYPES}
    return GgufSource(opened) if packed else PlainSource(opened)


def is_finite(tensor: Tensor) -> bool:
    """Whether every number is one; needs little memory besides."""
    flat = tensor.reshape(-1)
    return all(
        bool(torch.isfinite(flat[start : start + PIECE_NUMBERS]).all())
        for start in range(0, len(flat), PIECE_NUMBERS)
    )


def _require_foreign(folder: Path, shards: Sequence[Shard]) -> None:
    if any(VERSION_KEY in shard.metadata for shard in shards):
        raise CheckpointError(
            f"{folder} is already quantized: pass the unquantized checkpoint that it was made from"
        )
