"""What the grouped expert kernels share: how tiles of an expert's rows are cut, and all checks.

A tile is up to 8, 16 or 32 places of `SortedRouting.order` that belong to one expert (64 in a
prompt). Tiles of 8 rows cost a quarter of what tiles of 32 cost, and in a pass most experts have
about four rows. All sizes are in one kernel, so a pass has one launch for all of them. The grid has
room for as many tiles as there can be; programs without one end at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clover_local.kernels.gpu.check import check_float, check_operand
from clover_local.kernels.gpu.experts.record import ExpertSlots, MatrixFormat
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.linear.packed_linear import Pieces, pieces_of
from clover_local.kernels.gpu.route import SortedRouting
from clover_local.kernels.gpu.tiles import TRITON_TYPES


@dataclass(frozen=True)
class ExpertsConfig:
    """How the products of tiles are cut; the first whose tiles are large enough is taken."""

    smallest_m: int  # rows of the smallest tile
    sizes: int  # tiles of smallest_m, twice that, ...
    block_n: int  # features of a program; of gate and up together
    piece: int  # columns of a product, at most
    block_k: int  # columns of a step
    num_warps: int
    num_stages: int

    @property
    def largest_m(self) -> int:
        """Rows of the largest tile."""
        return self.smallest_m << (self.sizes - 1)


def choose(configs: Sequence[ExpertsConfig], *, tile_rows: int) -> ExpertsConfig:
    """The first configuration of a table with tiles of so many rows.

    Raises:
        ValueError: none has.
    """
    fitting = [config for config in configs if tile_rows <= config.largest_m]
    if not fitting:
        raise ValueError(f"tiles of {tile_rows} rows, at most {configs[-1].largest_m}")
    return fitting[0]


def pieces_for(matrix: MatrixFormat, config: ExpertsConfig, *, columns: int) -> Pieces:
    """The pieces and steps of a matrix's columns."""
    return pieces_of(matrix.group_size, columns=columns, piece=config.piece, block_k=config.block_k)


def check_results(results: Tensor, shape: tuple[int, int, int]) -> None:
    """`results` has this shape.

    Raises:
        ValueError: it has not, or is not float32.
    """
    if results.shape != shape or results.dtype != torch.float32:
        raise ValueError(f"results are {tuple(results.shape)} {results.dtype}, not {shape} float32")


def check_experts(
    x: Tensor, routing: SortedRouting, *, experts: ExpertSlots, columns: int
) -> tuple[int, int]:
    """T and A, after rows `x` of so many columns, routing and experts were checked.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"rows are {tuple(x.shape)}, the experts take {columns} columns")
    check_float("x", x)
    records, slots = experts.records, experts.slot_of_expert
    if records.dim() != 2 or records.shape[1] != experts.layout.nbytes:
        raise ValueError(
            f"records are {tuple(records.shape)}, one has {experts.layout.nbytes} bytes"
        )
    for name, tensor, dtype in (
        ("records", records, torch.uint8),
        ("slot_of_expert", slots, torch.int32),
        ("order", routing.order, torch.int32),
        ("tiles", routing.tiles, torch.int32),
        ("tile_count", routing.tile_count, torch.int32),
        ("weights", routing.routing.weights, torch.float32),
        ("x", x, x.dtype),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
        check_operand(name, tensor, device=x.device)
    rows, per_row = routing.routing.expert_ids.shape
    if len(routing.order) != rows * per_row:
        raise ValueError(f"order has {len(routing.order)} choices, {rows} x {per_row} rows")
    return rows, per_row


def gate_case(
    name: str,
    fn: Any,
    config: ExpertsConfig,
    *,
    matrix: MatrixFormat,
    columns: int,
    constants: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
) -> GateCase:
    """One configuration with rows of 16-bit floats.

    Args:
        fn: a kernel whose arguments have the names that they have here.
        matrix: how it is packed.
        columns: of the matrix.
        constants: of this kernel alone.
    """
    pieces = pieces_for(matrix, config, columns=columns)
    words = "*i64" if matrix.bits == 4 else "*i32"
    types = {"words_ptr": "*i32", "scale_ptr": "*bf16", "minimum_ptr": "*fp32", "x_ptr": words}
    types |= {"y_ptr": f"*{TRITON_TYPES[dtype]}", "results_ptr": "*fp32", "weights_ptr": "*fp32"}
    constexprs = {
        "BITS": matrix.bits,
        "GROUP": matrix.group_size,
        "PIECE": pieces.columns,
        "PIECES": pieces.count,
        "MINIMUM": matrix.has_minimum,
        "DTYPE": TRITON_TYPES[dtype],
        "BLOCK_N": config.block_n,
        "SMALLEST_M": config.smallest_m,
        "SIZES": config.sizes,
        **constants,
    }
    signature = {
        argument: "constexpr"
        if argument in constexprs
        else types.get(argument, "*i32" if argument.endswith("_ptr") else "i32")
        for argument in fn.arg_names
    }
    return GateCase(
        name=(
            f"{name} int{matrix.bits} M {config.largest_m} g{matrix.group_size}"
            + " min" * matrix.has_minimum
            + " f16" * (dtype == torch.float16)
        ),
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        wants_cp_async=True,
    )
