"""AWQ files of AutoAWQ's version `gemm`: 4 bits, w[n, k] = (stored[k, n] - zero[g, n]) * s[g, n].

    qweight  int32 [K, N / 8]  word j of row k holds outputs n = 8j + ORDER[i] at bit 4i
    qzeros   int32 [G, N / 8]  likewise
    scales   [G, N]

The order lets a GPU kernel turn a word into four pairs of halves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.checkpoint.packed import Misfit, PackedFormat, require
from clover_local.checkpoint.read import read_tensor
from clover_local.checkpoint.shards import TensorInfo
from clover_local.checkpoint.zero_points import minimum_of
from clover_local.errors import CheckpointError
from clover_local.files import Reader, as_flag, as_text
from clover_local.kernels.int4 import pack, unpack
from clover_local.kernels.packed import PackedWeight
from clover_local.quant.importers.layout import (
    groups_of,
    per_word,
    read_bits,
    read_group_size,
    require_floats,
    required,
)

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HALF = 1 << (BITS - 1)


def packed_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedWeight:
    """The weight that AWQ tensors stand for, exactly."""
    values = _in_order(unpack(qweight, BITS))  # [K, N], stored - 8
    zeros = _in_order(unpack(qzeros, BITS)).to(torch.int16) + HALF  # [G, N]
    scale = scales.T.contiguous()  # [N, G]
    return PackedWeight(
        pack(values.T.contiguous(), BITS),
        scale,
        minimum_of(zeros.T, scale),
        BITS,
        len(values) // scale.shape[1],
    )


def _in_order(values: Tensor) -> Tensor:
    """[R, N] by output, from the order of the words."""
    places = sorted(range(len(ORDER)), key=ORDER.__getitem__)
    return torch.unflatten(values, 1, (-1, len(ORDER)))[..., places].flatten(1)


@dataclass(frozen=True)
class AwqMatrix:
    """The tensors of one matrix."""

    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo
    format: PackedFormat

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        return (self.qweight, self.qzeros, self.scales)

    def check(self) -> None:
        """The headers say everything."""

    def read(self) -> PackedWeight:
        """The weight, from the files.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return packed_weight(
            read_tensor(self.qweight), read_tensor(self.qzeros), read_tensor(self.scales)
        )


@dataclass(frozen=True)
class AwqLayout:
    """The settings of one checkpoint."""

    group_size: int

    suffixes = ("qweight", "qzeros", "scales")

    def match(
        self, module: str, tensors: Mapping[str, TensorInfo], *, shape: tuple[int, ...]
    ) -> AwqMatrix:
        """The matrix `module` of shape [N, K].

        Raises:
            Misfit: its tensors contradict each other or the config.
        """
        rows, columns = shape
        qweight, qzeros, scales = (
            required(module, suffix, tensors=tensors) for suffix in self.suffixes
        )
        if rows % per_word(BITS) or columns % per_word(BITS):
            raise Misfit(f"{module}: its {rows} rows or {columns} columns fill no whole words")
        groups = groups_of(module, columns, group_size=self.group_size)
        require(qweight, "I32", (columns, rows // per_word(BITS)))
        require(qzeros, "I32", (groups, rows // per_word(BITS)))
        require_floats(scales, shape=(groups, rows))
        layout = PackedFormat(BITS, columns // groups, symmetric=False, scale_dtype=scales.dtype)
        return AwqMatrix(qweight, qzeros, scales, layout)


def parse_layout(reader: Reader) -> AwqLayout:
    """The layout that a `quantization_config` of AWQ describes.

    Raises:
        CheckpointError: bits, group size or `version` that are not imported.
        ConfigError: a missing or wrongly typed key.
    """
    version = reader.get("version", as_text, "gemm")
    if version.lower() != "gemm":
        raise CheckpointError(
            f"{reader.source}: version is {version!r}, only 'gemm' is imported: "
            "save the model again in that version"
        )
    if not reader.get("zero_point", as_flag, True):
        raise CheckpointError(
            f"{reader.source}: zero_point is false, which version gemm does not have: "
            "use another quantization of this model"
        )
    read_bits(reader, "bits", known=(BITS,))
    return AwqLayout(read_group_size(reader, "group_size"))
