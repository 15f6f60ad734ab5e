"""What a foreign format has to say about one matrix: which tensors it is, and its packed weight."""

from collections.abc import Mapping
from typing import Protocol

from clover_local.checkpoint.packed import FLOAT_DTYPES, Misfit, PackedFormat, described
from clover_local.checkpoint.shards import TensorInfo
from clover_local.errors import CheckpointError
from clover_local.files import Reader, as_integer
from clover_local.kernels.int4 import WORD_BITS
from clover_local.kernels.packed import PackedWeight

WHOLE_COLUMN = -1  # as group_size: one scale for each output
COLUMN_MULTIPLE = 32  # K of a matrix with one group


class Matrix(Protocol):
    """One packed matrix of the files, checked by its header."""

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is made of."""

    @property
    def format(self) -> PackedFormat:
        """How its packed weight will be."""

    def check(self) -> None:
        """Reads what the header cannot say and is small; raises Misfit."""

    def read(self) -> PackedWeight:
        """The weight, from the files.

        Raises:
            CheckpointError: a file cannot be read, or its numbers contradict the config.
        """


class Layout(Protocol):
    """A format with the settings of one checkpoint."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What may follow a matrix's name `X.` where it is packed."""

    def match(
        self, module: str, tensors: Mapping[str, TensorInfo], *, shape: tuple[int, ...]
    ) -> Matrix:
        """The matrix `module` (without `.weight`), which has to be of `shape`; raises Misfit."""


def read_bits(reader: Reader, key: str, *, known: tuple[int, ...]) -> int:
    """The width that a config states, refused by name where the format or we have no such."""
    bits = reader.get(key, as_integer)
    if bits not in known:
        widths = " and ".join(map(str, known))
        raise CheckpointError(
            f"{reader.source}: {key} is {bits}, imported are {widths}: "
            "use another quantization of this model, or quantize its BF16 weights"
        )
    return bits


def read_group_size(reader: Reader, key: str) -> int:
    """The group size that a config states: positive, or -1 for whole columns."""
    group_size = reader.get(key, as_integer)
    if group_size < 1 and group_size != WHOLE_COLUMN:
        raise CheckpointError(
            f"{reader.source}: {key} is {group_size}, expected a positive number or -1: "
            "use another quantization of this model, or quantize its BF16 weights"
        )
    return group_size


def groups_of(module: str, columns: int, *, group_size: int) -> int:
    """How many groups K is cut into; raises Misfit where that is no whole number."""
    if group_size == WHOLE_COLUMN:
        if columns % COLUMN_MULTIPLE:
            raise Misfit(
                f"{module}: {columns} columns in one group are no multiple of {COLUMN_MULTIPLE}"
            )
        return 1
    if columns % group_size:
        raise Misfit(f"{module}: group_size {group_size} does not divide its {columns} columns")
    return columns // group_size


def required(module: str, suffix: str, *, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    """The tensor `module.suffix`; raises Misfit where it is missing."""
    try:
        return tensors[f"{module}.{suffix}"]
    except KeyError:
        raise Misfit(f"{module} lacks {suffix}") from None


def require_floats(tensor: TensorInfo, *, shape: tuple[int, int]) -> None:
    """Raises Misfit where a tensor is not of floats and of `shape`."""
    if tensor.dtype not in FLOAT_DTYPES or tensor.shape != shape:
        raise Misfit(f"{described(tensor)}, expected {' or '.join(FLOAT_DTYPES)} {list(shape)}")


def per_word(bits: int) -> int:
    """How many integers a word of 32 bits holds."""
    return WORD_BITS // bits
