"""compressed-tensors' `pack-quantized`: the layout of our own files, made by other programs.

`checkpoint/packed.py` knows the tensors; what is checked here is that config.json asks for nothing
that they do not show, such as quantized activations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clover_local.checkpoint.packed import (
    BITS,
    PARTS,
    Misfit,
    PackedFormat,
    PackedInfo,
    match_packed,
)
from clover_local.checkpoint.placements import QUANT_FORMAT
from clover_local.checkpoint.read import packed_weight, read_tensor
from clover_local.checkpoint.shards import TensorInfo, read_integers
from clover_local.errors import CheckpointError
from clover_local.files import Reader, as_flag, as_object, as_text
from clover_local.kernels.packed import PackedWeight
from clover_local.quant.importers.layout import (
    WHOLE_COLUMN,
    groups_of,
    read_bits,
    read_group_size,
)

G_IDX = "weight_g_idx"
"""Marks act-order: the group of each column."""

_WITHOUT = {  # of a config group or the whole config: what must not be asked for
    "input_activations": "quantized activations",
    "output_activations": "quantized activations",
    "kv_cache_scheme": "a quantized cache",
    "sparsity_config": "sparse weights",
    "transform_config": "transformed weights",
}


@dataclass(frozen=True)
class PackQuantizedMatrix:
    """The tensors of one matrix."""

    info: PackedInfo
    rows: int
    columns: int

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        return self.info.parts

    @property
    def format(self) -> PackedFormat:
        """How the packed weight is."""
        return self.info.format

    def check(self) -> None:
        """Raises Misfit where `weight_shape` says another shape."""
        name = self.info.shape.name
        shape = read_integers([self.info.shape])[name]
        if shape != (self.rows, self.columns):
            raise Misfit(f"{name} says {list(shape)}, expected {[self.rows, self.columns]}")

    def read(self) -> PackedWeight:
        """The weight, from the files.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return packed_weight(self.info, read_tensor)


@dataclass(frozen=True)
class PackQuantizedLayout:
    """The settings of one checkpoint: what its config groups have, in any order."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    symmetric: tuple[bool, ...]

    suffixes = (*(f"weight{part}" for part in PARTS), G_IDX)

    def match(
        self, module: str, tensors: Mapping[str, TensorInfo], *, shape: tuple[int, ...]
    ) -> PackQuantizedMatrix:
        """The matrix `module` of shape [N, K].

        Raises:
            Misfit: its tensors contradict each other or the config.
        """
        if f"{module}.{G_IDX}" in tensors:
            raise Misfit(f"{module}.{G_IDX} is there, so its matrix has act-order")
        rows, columns = shape
        info = match_packed(f"{module}.weight", tensors, shape=shape)
        if info.format.bits not in self.bits:
            raise Misfit(f"{module} has {info.format.bits} bits, config.json says {self.bits[0]}")
        if info.format.symmetric not in self.symmetric:
            word = str(self.symmetric[0]).lower()
            has = "no zero points" if info.format.symmetric else "zero points"
            raise Misfit(f"{module} has {has}, config.json says symmetric: {word}")
        groups = columns // info.format.group_size
        fits = [
            groups_of(module, columns, group_size=size) == groups
            for size in self.group_sizes
            if len(self.group_sizes) == 1 or size < 1 or columns % size == 0
        ]
        if not any(fits):
            raise Misfit(f"{module} has {groups} groups, config.json says another group_size")
        return PackQuantizedMatrix(info, rows, columns)


def parse_layout(reader: Reader) -> PackQuantizedLayout:
    """The layout that a `quantization_config` of compressed-tensors describes.

    Raises:
        CheckpointError: a format, strategy, width or anything else that is not imported.
        ConfigError: a missing or wrongly typed key.
    """
    _refuse_all_but(reader, "quantization_status", ("compressed",))
    _refuse_all_but(reader, "format", (QUANT_FORMAT, "mixed-precision"))
    _refuse_extras(reader)
    named = Reader(f"{reader.source}: config_groups", reader.get("config_groups", as_object))
    groups = [
        Reader(f"{named.source}: {name}", named.get(name, as_object)) for name in named.values
    ]
    if not groups:
        raise CheckpointError(f"{reader.source}: config_groups is empty: download it again")
    widths, sizes, symmetric = [], [], []
    for group in groups:
        _refuse_all_but(group, "format", (QUANT_FORMAT,))
        _refuse_extras(group)
        weights = Reader(f"{group.source}: weights", group.get("weights", as_object))
        widths.append(read_bits(weights, "num_bits", known=BITS))
        sizes.append(_group_size(weights))
        symmetric.append(weights.get("symmetric", as_flag, True))
    return PackQuantizedLayout(tuple(widths), tuple(sizes), tuple(symmetric))


def _group_size(weights: Reader) -> int:
    _refuse_all_but(weights, "type", ("int",))
    _refuse_all_but(weights, "strategy", ("group", "channel"))
    if weights.get("dynamic", as_flag, False):
        raise _refused(weights, "dynamic", True, "false")
    act_order: Any = weights.values.get("actorder")
    if act_order not in (None, False, "weight", "static"):
        raise _refused(weights, "actorder", act_order, "weight or none")
    if weights.get("strategy", as_text, "group") == "channel":
        return WHOLE_COLUMN
    return read_group_size(weights, "group_size")


def _refuse_all_but(reader: Reader, key: str, known: tuple[str, ...]) -> None:
    value = reader.get(key, as_text, known[0])
    if value not in known:
        raise _refused(reader, key, value, " or ".join(known))


def _refuse_extras(reader: Reader) -> None:
    for key, what in _WITHOUT.items():
        asked = reader.values.get(key)
        if asked and not (isinstance(asked, dict) and asked.get("format") == "dense"):
            raise CheckpointError(
                f"{reader.source}: {key} asks for {what}, which this runtime does not have: "
                "use a model with quantized weights only"
            )


def _refused(reader: Reader, key: str, value: object, known: str) -> CheckpointError:
    return CheckpointError(
        f"{reader.source}: {key} is {value!r}, imported is {known}: "
        "use another quantization of this model, or quantize its BF16 weights"
    )
