"""A checkpoint of another format, opened so that it reads like one of ours, matrix by matrix.

Everything is decided before a weight is read, with every complaint at once. Matrices that the file
leaves unpacked come as they are; experts have a name each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_local.checkpoint.packed import FLOAT_DTYPES, Misfit, PackedFormat, described
from clover_local.checkpoint.parameters import DOWN, EMBEDDING, GATE_UP, HEAD, Target
from clover_local.checkpoint.placements import (
    QUANT_METHOD,
    by_parameter,
    complaints,
    find_prefix,
    foreign_names,
    notes_on,
    wanted_targets,
)
from clover_local.checkpoint.read import ExpertWeights, joined, read_tensor
from clover_local.checkpoint.shards import Shard, TensorInfo, read_shards
from clover_local.config import ModelConfig
from clover_local.errors import CheckpointError
from clover_local.files import Reader
from clover_local.kernels.packed import Weight
from clover_local.quant.importers import awq, compressed_tensors, gptq
from clover_local.quant.importers.layout import Layout, Matrix

CONFIG_KEY = "quantization_config"

_PARSERS: dict[str, Callable[[Reader], Layout]] = {
    "gptq": gptq.parse_layout,
    "awq": awq.parse_layout,
    QUANT_METHOD: compressed_tensors.parse_layout,
}
METHODS = tuple(_PARSERS)


@dataclass(frozen=True)
class ForeignPart:
    """A tensor or packed matrix of the files, and the place where it goes."""

    source: TensorInfo | Matrix
    target: Target

    def read(self) -> Weight:
        """The weight, in the dtypes of the files."""
        if isinstance(self.source, TensorInfo):
            return read_tensor(self.source).view(self.target.shape)
        return self.source.read()


@dataclass(frozen=True)
class ForeignCheckpoint:
    """The weight files of a model that another program quantized, matched with its config.

    `parts` are those of a parameter, or of one expert's share of it, by their first rows.
    `formats` says how each packed matrix is packed, by the name `X.weight` that it would have
    without prefix. `problems` is empty when everything can be imported.
    """

    folder: Path
    config: ModelConfig
    method: str
    prefix: str
    shards: tuple[Shard, ...]
    parts: Mapping[tuple[str, int | None], tuple[ForeignPart, ...]]
    formats: Mapping[str, PackedFormat]
    has_diffusion: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def require_fit(self) -> None:
        """Raises CheckpointError with every problem, if there is one."""
        if self.problems:
            raise CheckpointError(
                f"{self.folder}: the {self.method} weights cannot be imported: "
                f"{'; '.join(self.problems)}: use another quantization of this model, or quantize "
                "its BF16 weights"
            )

    def read_outer(self) -> dict[str, Weight]:
        """As `checkpoint.read.read_outer`."""
        outer = self._read_where(lambda name: not name.startswith("layers."))
        if self.config.tie_word_embeddings:
            outer.setdefault(HEAD, outer[EMBEDDING])
        return outer

    def read_layer(self, layer: int) -> dict[str, Weight]:
        """As `checkpoint.read.read_layer`."""
        return self._read_where(lambda name: name.startswith(f"layers.{layer}."))

    def read_experts(self, layer: int, experts: Sequence[int]) -> ExpertWeights:
        """As `checkpoint.read.read_experts`."""
        gate_up, down = GATE_UP.format(layer=layer), DOWN.format(layer=layer)
        return ExpertWeights(
            [self._read(gate_up, expert) for expert in experts],
            [self._read(down, expert) for expert in experts],
        )

    def _read_where(self, wanted: Callable[[str], bool]) -> dict[str, Weight]:
        names = [name for name, expert in self.parts if expert is None and wanted(name)]
        return {name: self._read(name, None) for name in names}

    def _read(self, name: str, expert: int | None) -> Weight:
        return joined([part.read() for part in self.parts[name, expert]])


def detect(config_json: Mapping[str, Any]) -> str | None:
    """Which method `config.json` says the weights were quantized by: None where by none.

    A method that is not among `METHODS` is returned too, so that it can be refused by name.
    """
    settings = config_json.get(CONFIG_KEY)
    if not isinstance(settings, dict):
        return None
    return str(settings.get("quant_method", "unknown"))


def open_foreign(
    folder: Path, config: ModelConfig, *, config_json: Mapping[str, Any]
) -> ForeignCheckpoint:
    """Reads the headers of all weight files, and what is as small, and matches them with `config`.

    Args:
        config_json: the object in `config.json`, for its `quantization_config`.

    Raises:
        CheckpointError: missing or damaged files, or a quantization that is not imported. Tensors
            that do not fit are no error here: they are `problems`.
        ConfigError: a missing or wrongly typed key of `quantization_config`.
    """
    method = detect(config_json)
    if method not in _PARSERS:
        raise CheckpointError(
            f"{folder}: weights quantized by {method} are not imported, those of "
            f"{', '.join(METHODS)} are: use another quantization of this model, or quantize its "
            "BF16 weights"
        )
    source = f"{folder / 'config.json'}: {CONFIG_KEY}"
    layout = _PARSERS[method](Reader(source, config_json[CONFIG_KEY]))
    shards = read_shards(folder)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    skipped = foreign_names(tensors)
    prefix = find_prefix(tensors)
    wanted = wanted_targets(config, tensors, prefix=prefix, per_expert=True)
    has_diffusion = any(target.kind.diffusion for target in wanted.values())
    head = HEAD.removesuffix("weight")
    if config.tie_word_embeddings and not any(
        head + suffix in tensors for suffix in ("weight", *layout.suffixes)
    ):
        del wanted[HEAD]
    found = _Match(layout, tensors, wanted)
    return ForeignCheckpoint(
        folder=folder,
        config=config,
        method=method,
        prefix=prefix,
        shards=shards,
        parts=found.parts,
        formats={
            name.removeprefix(prefix): matrix.format for name, matrix in found.matrices.items()
        },
        has_diffusion=has_diffusion,
        notes=notes_on(skipped, has_diffusion=has_diffusion),
        problems=(
            *found.problems,
            *complaints(("surplus", sorted(tensors.keys() - found.used - set(skipped)))),
        ),
    )


class _Match:
    """The tensors of every wanted name, and what is wrong with them."""

    def __init__(
        self, layout: Layout, tensors: Mapping[str, TensorInfo], wanted: Mapping[str, Target]
    ) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.used: set[str] = set()
        self._layout = layout
        self._tensors = tensors
        parts: list[ForeignPart] = []
        missing, misfits = [], []
        for name, target in wanted.items():
            try:
                source = self._source(name, target)
            except Misfit as misfit:
                misfits.append(str(misfit))
                continue
            if source is None:
                missing.append(name)
            else:
                parts.append(ForeignPart(source, target))
        self.parts = by_parameter(parts)
        unlike = [
            f"{name} of expert {expert}"
            for name, expert in self.parts
            if self._unlike(name, expert)
        ]
        self.problems = complaints(
            ("missing", missing), ("wrong", misfits), ("with gate and up in two formats", unlike)
        )

    def _source(self, name: str, target: Target) -> TensorInfo | Matrix | None:
        """What stands for `name`: None where nothing does."""
        module = name.removesuffix(".weight")
        packed = {f"{module}.{suffix}" for suffix in self._layout.suffixes} & self._tensors.keys()
        self.used |= packed
        plain = self._tensors.get(name)
        if plain is not None:
            self.used.add(name)
            if packed:
                raise Misfit(f"{name} is there beside {min(packed)}")
            return _checked(plain, target)
        if not packed:
            return None
        if not target.kind.packable:
            raise Misfit(f"{min(packed)}: this runtime needs {name} unquantized")
        matrix = self._layout.match(module, self._tensors, shape=target.shape)
        matrix.check()
        self.matrices[name] = matrix
        return matrix

    def _unlike(self, name: str, expert: int | None) -> bool:
        """Whether the parts of a matrix cannot be stacked."""
        formats = {
            None if isinstance(part.source, TensorInfo) else part.source.format
            for part in self.parts[name, expert]
        }
        return len(formats) > 1


def _checked(tensor: TensorInfo, target: Target) -> TensorInfo:
    if tensor.dtype not in FLOAT_DTYPES or tensor.shape not in target.shapes_on_disk:
        expected = " or ".join(str(list(shape)) for shape in target.shapes_on_disk)
        raise Misfit(f"{described(tensor)}, expected {' or '.join(FLOAT_DTYPES)} {expected}")
    return tensor
