"""GPTQ files, versions 1 and 2: AutoGPTQ's and GPTQModel's layout.

For a matrix N x K with G = K / group_size groups, w[n, k] = (stored[k, n] - zero[g, n]) * s[g, n]:

    qweight  int32 [K * bits / 32, N]  word r holds columns k = r * (32 / bits) + i at bit i * bits
    qzeros   int32 [G, N * bits / 32]  word j holds outputs n likewise; version 1 stores zero - 1
    scales   [G, N]
    g_idx    int32 [K]                 group of each column; k // group_size unless act-order

Transposed, the words of `qweight` are those of `kernels/int4.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clover_local.checkpoint.packed import (
    BITS,
    WORD_BITS,
    Misfit,
    PackedFormat,
    described,
    require,
)
from clover_local.checkpoint.read import read_tensor
from clover_local.checkpoint.shards import TensorInfo
from clover_local.checkpoint.zero_points import minimum_of
from clover_local.errors import CheckpointError
from clover_local.files import Reader, as_flag, as_object, as_text
from clover_local.kernels.int4 import unpack
from clover_local.kernels.packed import PackedWeight
from clover_local.quant.importers.layout import (
    groups_of,
    per_word,
    read_bits,
    read_group_size,
    require_floats,
    required,
)

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`: what is added to a stored zero."""


def packed_weight(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int, zero_offset: int, symmetric: bool
) -> PackedWeight:
    """The weight that GPTQ tensors stand for, exactly.

    Args:
        symmetric: every zero is 2^(bits - 1), so that none is needed.

    Raises:
        ValueError: `symmetric`, and another zero.
    """
    half = 1 << (bits - 1)
    zeros = unpack(qzeros, bits).to(torch.int16) + half + zero_offset  # [G, N]
    if symmetric and bool((zeros != half).any()):
        raise ValueError(f"a zero point other than {half}")
    scale = scales.T.contiguous()  # [N, G]
    columns = len(qweight) * per_word(bits)
    return PackedWeight(
        qweight.T.contiguous(),
        scale,
        None if symmetric else minimum_of(zeros.T, scale),
        bits,
        columns // scale.shape[1],
    )


@dataclass(frozen=True)
class GptqMatrix:
    """The tensors of one matrix."""

    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo
    g_idx: TensorInfo | None
    format: PackedFormat
    zero_offset: int

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        g_idx = () if self.g_idx is None else (self.g_idx,)
        return (self.qweight, self.qzeros, self.scales, *g_idx)

    def check(self) -> None:
        """Raises Misfit where columns are not in the order of their groups."""
        if self.g_idx is None:
            return
        columns = torch.arange(self.g_idx.shape[0])
        if not torch.equal(read_tensor(self.g_idx).long(), columns // self.format.group_size):
            raise Misfit(f"{self.g_idx.name} is not in order, so its matrix has act-order")

    def read(self) -> PackedWeight:
        """The weight, from the files.

        Raises:
            CheckpointError: a file cannot be read, or zeros contradict `sym`.
        """
        try:
            return packed_weight(
                read_tensor(self.qweight),
                read_tensor(self.qzeros),
                read_tensor(self.scales),
                bits=self.format.bits,
                zero_offset=self.zero_offset,
                symmetric=self.format.symmetric,
            )
        except ValueError as error:
            raise CheckpointError(
                f"{self.qzeros.shard}: {self.qzeros.name} has {error} though config.json says sym: "
                "correct sym or checkpoint_format there"
            ) from None


@dataclass(frozen=True)
class GptqLayout:
    """The settings of one checkpoint; `varied` ones give single matrices others."""

    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int
    act_order: bool
    varied: bool

    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def match(
        self, module: str, tensors: Mapping[str, TensorInfo], *, shape: tuple[int, ...]
    ) -> GptqMatrix:
        """The matrix `module` of shape [N, K].

        Raises:
            Misfit: its tensors contradict each other or the config.
        """
        rows, columns = shape
        qweight, qzeros, scales = (
            required(module, suffix, tensors=tensors) for suffix in ("qweight", "qzeros", "scales")
        )
        g_idx = tensors.get(f"{module}.g_idx")
        bits = self._bits(qweight, rows, columns)
        if rows % per_word(bits):
            raise Misfit(f"{module}: its {rows} rows of zeros fill no whole words")
        groups = self._groups(module, scales, columns)
        require(qzeros, "I32", (groups, rows * bits // WORD_BITS))
        require_floats(scales, shape=(groups, rows))
        if g_idx is None and self.act_order:
            raise Misfit(f"{module} lacks g_idx, which act-order needs")
        if g_idx is not None:
            require(g_idx, "I32", (columns,))
        layout = PackedFormat(bits, columns // groups, self.symmetric, scales.dtype)
        return GptqMatrix(qweight, qzeros, scales, g_idx, layout, self.zero_offset)

    def _bits(self, qweight: TensorInfo, rows: int, columns: int) -> int:
        widths = BITS if self.varied else (self.bits,)
        for bits in widths:
            if columns % per_word(bits) == 0 and (qweight.dtype, qweight.shape) == (
                "I32",
                (columns // per_word(bits), rows),
            ):
                return bits
        words = " or ".join(f"{columns * bits / WORD_BITS:g}" for bits in widths)
        raise Misfit(f"{described(qweight)}, expected I32 [{words}, {rows}]")

    def _groups(self, module: str, scales: TensorInfo, columns: int) -> int:
        if not self.varied:
            return groups_of(module, columns, group_size=self.group_size)
        groups = scales.shape[0] if scales.shape else 0
        if not groups or columns % groups:
            raise Misfit(f"{described(scales)}: {columns} columns are not {groups} equal groups")
        return groups


def parse_layout(reader: Reader) -> GptqLayout:
    """The layout that a `quantization_config` of GPTQ describes.

    Raises:
        CheckpointError: bits, group size or `checkpoint_format` that are not imported.
        ConfigError: a missing or wrongly typed key.
    """
    version = reader.get("checkpoint_format", as_text, "gptq")
    if version not in ZERO_OFFSETS:
        raise CheckpointError(
            f"{reader.source}: checkpoint_format is {version!r}, imported are "
            f"{' and '.join(ZERO_OFFSETS)}: save the model again in one of those"
        )
    dynamic: dict[str, Any] = reader.get("dynamic", as_object, {})
    return GptqLayout(
        bits=read_bits(reader, "bits", known=BITS),
        group_size=read_group_size(reader, "group_size"),
        symmetric=reader.get("sym", as_flag, False),
        zero_offset=ZERO_OFFSETS[version],
        act_order=reader.get("desc_act", as_flag, False),
        varied=bool(dynamic),
    )
