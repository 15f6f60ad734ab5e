"""What the parts of a model take in memory, from its config and formats; needs no torch.

Two ways lead here: a config and the formats that its matrices are going to have, and the summary of
a checkpoint that is there. Both count what runs, not what the files hold: norms, routers and the
small GDN tensors are float32, matrices that are not packed have the dtype of the activations, and
an expert is a record whose parts are aligned (`kernels/gpu/experts/record.py` is the layout).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from clover_local.checkpoint.parameters import EMBEDDING, HEAD, targets
from clover_local.checkpoint.summary import Group, RecordSize, Summary
from clover_local.config import ModelConfig

ALIGNMENT = 256
SMALL_BYTES = 4  # float32
MINIMUM_BYTES = 4  # of a group of an asymmetric matrix


@dataclass(frozen=True)
class StorageFormat:
    """How a matrix is stored: integers in groups of columns, or plain numbers (no group)."""

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    scale_bytes: int = 2

    def divides(self, columns: int) -> bool:
        """Whether groups of this size divide so many columns."""
        return self.group_size is None or columns % self.group_size == 0

    def parts(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Bytes of numbers, scales and minima of a matrix."""
        groups = rows * (columns // self.group_size) if self.group_size else 0
        minima = 0 if self.symmetric else groups * MINIMUM_BYTES
        return rows * columns * self.bits // 8, groups * self.scale_bytes, minima

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        return sum(self.parts(rows, columns))


@dataclass(frozen=True)
class Formats:
    """The formats of a model's matrices.

    Of `trunk` and `head` the first one whose groups divide a matrix; plain where none does.
    """

    gate_up: StorageFormat
    down: StorageFormat
    trunk: tuple[StorageFormat, ...] = ()
    head: tuple[StorageFormat, ...] = ()


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of each part of a model as it runs; `records` are each layer's experts by size."""

    config: ModelConfig
    number_bytes: int  # of an activation, of keys and values, of what is not packed
    records: tuple[tuple[RecordSize, ...], ...]
    trunk: int
    head: int
    embedding: int  # 0 where the head, which lies on the device, serves as one
    small: int

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Per layer the size of a slot that can hold any of its experts."""
        return tuple(max(size.bytes for size in layer) for layer in self.records)

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Per layer the bytes of all its experts."""
        return tuple(sum(size.bytes * size.experts for size in layer) for layer in self.records)

    @property
    def experts(self) -> int:
        """Bytes of all experts."""
        return sum(self.layer_bytes)

    @property
    def attention_layers(self) -> int:
        """How many layers have keys and values."""
        return sum(map(self.config.is_attention, range(self.config.num_hidden_layers)))

    @property
    def token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        c = self.config
        return self.attention_layers * 2 * c.num_key_value_heads * c.head_dim * self.number_bytes

    @property
    def state(self) -> int:
        """Bytes of one set of recurrent and conv states, float32."""
        c = self.config
        recurrent = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
        conv = (c.linear_conv_kernel_dim - 1) * c.qkv_dim
        return (c.num_hidden_layers - self.attention_layers) * (recurrent + conv) * SMALL_BYTES


def record_bytes(config: ModelConfig, *, gate_up: StorageFormat, down: StorageFormat) -> int:
    """Bytes of one expert's record: gate, up and down, every part aligned."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    matrices = (gate_up.parts(inner, hidden),) * 2 + (down.parts(hidden, inner),)
    return sum(_aligned(part) for matrix in matrices for part in matrix)


def from_config(
    config: ModelConfig, formats: Formats, *, number_bytes: int = 2, diffusion: bool = True
) -> ModelBytes:
    """The bytes of a model of this shape in these formats, with or without diffusion tensors.

    Raises:
        ValueError: groups that do not divide an expert's columns.
    """
    for columns, matrix in (
        (config.hidden_size, formats.gate_up),
        (config.moe_intermediate_size, formats.down),
    ):
        if not matrix.divides(columns):
            raise ValueError(f"groups of {matrix.group_size} do not divide {columns} columns")
    plain = StorageFormat(8 * number_bytes)

    def stored(shape: tuple[int, ...], choices: tuple[StorageFormat, ...]) -> int:
        rows, columns = shape
        fitting = next((choice for choice in choices if choice.divides(columns)), plain)
        return _running(fitting, number_bytes).nbytes(rows, columns)

    record = record_bytes(
        config,
        gate_up=_running(formats.gate_up, number_bytes),
        down=_running(formats.down, number_bytes),
    )
    tied = config.tie_word_embeddings
    return ModelBytes(
        config=config,
        number_bytes=number_bytes,
        records=((RecordSize(record, config.num_experts),),) * config.num_hidden_layers,
        trunk=sum(stored(shape, formats.trunk) for shape in _packable(config)),
        head=stored((config.vocab_size, config.hidden_size), () if tied else formats.head),
        embedding=0 if tied else _table(config) * number_bytes,
        small=_small(config, diffusion=diffusion),
    )


def from_summary(config: ModelConfig, summary: Summary, *, number_bytes: int = 2) -> ModelBytes:
    """The bytes of a checkpoint whose headers were counted.

    Raises:
        ValueError: the summary has not a record for each layer of `config`.
    """
    if len(summary.records) != config.num_hidden_layers or not all(summary.records):
        raise ValueError(f"records of {len(summary.records)} layers of {config.num_hidden_layers}")
    trunk = sum(prod(shape) for shape in _packable(config))
    candidates = [_format_of(group) for group in summary.experts]
    return ModelBytes(
        config=config,
        number_bytes=number_bytes,
        records=tuple(
            tuple(
                replace(size, bytes=_record(config, size.bytes, candidates, number_bytes))
                for size in layer
            )
            for layer in summary.records
        ),
        trunk=_grouped(summary.trunk, trunk, number_bytes),
        head=_grouped(summary.head, _table(config), number_bytes),
        embedding=_table(config) * number_bytes if summary.head else 0,
        small=_small(config, diffusion=bool(summary.diffusion)),
    )


def _table(config: ModelConfig) -> int:
    """Numbers of the embedding, and of the head."""
    return config.vocab_size * config.hidden_size


def _packable(config: ModelConfig) -> list[tuple[int, ...]]:
    """The shapes of the trunk's matrices."""
    return [
        target.shape
        for name, target in targets(config, prefix="", per_expert=False)
        if target.kind.packable and name != HEAD
    ]


def _small(config: ModelConfig, *, diffusion: bool) -> int:
    """Everything that is float32: norms, routers, shared experts' gates, the vectors of GDN."""
    return SMALL_BYTES * sum(
        prod(target.shape)
        for name, target in targets(config, prefix="", per_expert=False)
        if not (target.kind.packable or target.kind.fused or name in (HEAD, EMBEDDING))
        and (diffusion or not target.kind.diffusion)
    )


def _running(matrix: StorageFormat, number_bytes: int) -> StorageFormat:
    """A matrix as it runs: plain numbers in the dtype of the activations."""
    return matrix if matrix.group_size else StorageFormat(8 * number_bytes)


def _format_of(group: Group) -> StorageFormat:
    """A group's format, the bytes of a scale from what the group takes besides its integers.

    A symmetric group has a scale; an asymmetric one a zero point of 4 or 8 bits, or a float32
    minimum too. Shapes and padding add a fraction of a byte.
    """
    if group.group_size is None:
        return StorageFormat({"F32": 32}.get(group.format, 16))
    bits = int(group.format.removeprefix("INT"))
    rest = group.bytes - group.numbers * bits / 8
    each = rest * group.group_size / max(group.numbers, 1)
    wide = each >= 4 if group.symmetric else 4 <= each < 6 or each >= 8
    return StorageFormat(bits, group.group_size, group.symmetric, scale_bytes=4 if wide else 2)


def _grouped(groups: Iterable[Group], numbers: int, number_bytes: int) -> int:
    """Bytes of so many numbers of matrices, of which those in packed `groups` are packed."""
    total = 0
    for group in groups:
        if group.group_size is not None:
            total += _format_of(group).nbytes(1, group.numbers)
            numbers -= group.numbers
    return total + max(numbers, 0) * number_bytes


def _record(
    config: ModelConfig, nbytes: int, candidates: list[StorageFormat], number_bytes: int
) -> int:
    """The record of an expert whose numbers and scales take `nbytes` in the files."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    for gate_up, down in product(candidates, repeat=2):
        matrices = (gate_up.parts(2 * inner, hidden), down.parts(hidden, inner))
        fits = gate_up.divides(hidden) and down.divides(inner)
        if fits and nbytes == sum(numbers + scales for numbers, scales, _ in matrices):
            return record_bytes(
                config,
                gate_up=_running(gate_up, number_bytes),
                down=_running(down, number_bytes),
            )
    return _aligned(nbytes)  # a mixture that the summary does not tell: without the parts' ends


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
