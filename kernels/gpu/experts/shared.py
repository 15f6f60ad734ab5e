"""y = down(silu(gate(x)) * up(x)): the shared expert, by the kernels of the routed ones.

Defined by `packed_linear_reference` and silu. A packed shared expert is a record in the only slot
and every row chooses it with weight 1, so silu and product are fused, and two launches do what four
did. Its result has the form of one more place of the experts' sum.
"""

import torch
from torch import Tensor

from clover_local.kernels.gpu.experts.down import CONFIGS as DOWN_CONFIGS
from clover_local.kernels.gpu.experts.down import down_kernel, expert_down
from clover_local.kernels.gpu.experts.gate_up import CONFIGS as GATE_UP_CONFIGS
from clover_local.kernels.gpu.experts.gate_up import expert_gate_up, gate_up_kernel
from clover_local.kernels.gpu.experts.record import (
    ExpertSlots,
    MatrixFormat,
    format_of,
    record_layout,
    write_record,
)
from clover_local.kernels.gpu.experts.row_tiles import ExpertsConfig, gate_case
from clover_local.kernels.gpu.gate import GateCase
from clover_local.kernels.gpu.linear.packed_linear import SMALLEST_GROUP
from clover_local.kernels.gpu.route import TILE_ROWS, SortedRouting
from clover_local.kernels.packed import PackedWeight, stack
from clover_local.kernels.route import Routing

# A pass has one tile, where routed experts have 70: the tables of `gate_up.py` and `down.py` would
# make 8 and 32 programs of it. Narrow tiles make 32 and 64, with 16 and 8 KB of weights under way
# each; all together they read x from the second-level cache. Not measured on a card yet.
GATE_UP = ExpertsConfig(8, 3, block_n=32, piece=64, block_k=128, num_warps=4, num_stages=5)
# Steps of 128 columns spill on sm_80, with minima in groups of 32.
DOWN = ExpertsConfig(8, 3, block_n=32, piece=64, block_k=64, num_warps=4, num_stages=5)


def shared_slots(gate: PackedWeight, up: PackedWeight, *, down: PackedWeight) -> ExpertSlots:
    """A shared expert as the only record of a layer of one expert, where its weights lie: a copy.

    Args:
        gate: [F, D], of 4 or 8 bits; groups are a multiple of 32, up to all columns of a row.
        up: likewise, in the format of `gate`.
        down: [D, F]; may have another format.

    Raises:
        ValueError: shapes or formats that do not fit.
    """
    if format_of(gate) != format_of(up):
        raise ValueError(f"gate is {format_of(gate)}, up {format_of(up)}")
    if gate.shape != up.shape or down.shape != gate.shape[::-1]:
        raise ValueError(f"gate is {gate.shape}, up {up.shape}, down {down.shape}")
    for name, weight in (("gate", gate), ("down", down)):
        if weight.group_size % SMALLEST_GROUP:
            raise ValueError(
                f"{name} has groups of {weight.group_size}, no multiple of {SMALLEST_GROUP}"
            )
    inner, hidden = gate.shape
    layout = record_layout(hidden, inner, gate_up=format_of(gate), down=format_of(down))
    device = gate.data.device
    records = torch.zeros(1, layout.nbytes, dtype=torch.uint8, device=device)
    write_record(records[0], layout, gate_up=stack([gate, up]), down=down)
    return ExpertSlots(records, layout, torch.zeros(1, dtype=torch.int32, device=device))


def every_row(
    rows: int, *, device: torch.device | str, tile_rows: int = TILE_ROWS
) -> SortedRouting:
    """The routing of rows that all choose expert 0 with weight 1; it is copied from the host.

    Args:
        rows: T.
        device: of the rows.
        tile_rows: the most rows of a tile.

    Raises:
        ValueError: a number is out of range.
    """
    if rows < 1 or tile_rows < 1:
        raise ValueError(f"{rows} rows in tiles of {tile_rows}, at least 1 of 1 is needed")
    tiles = [[0, first, min(tile_rows, rows - first), 0] for first in range(0, rows, tile_rows)]
    routing = Routing(
        torch.zeros(rows, 1, dtype=torch.int64, device=device),
        torch.ones(rows, 1, dtype=torch.float32, device=device),
    )
    return SortedRouting(
        routing=routing,
        coreset=None,
        order=torch.arange(rows, dtype=torch.int32, device=device),
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        tile_count=torch.tensor([len(tiles)], dtype=torch.int32, device=device),
        tile_rows=tile_rows,
    )


def shared_expert(
    x: Tensor,
    *,
    slots: ExpertSlots,
    every: SortedRouting,
    results: Tensor | None = None,
) -> Tensor:
    """down(silu(gate(x)) * up(x)): [T, D] float32, a view of `results`.

    Args:
        x: [T, D], contiguous.
        slots: from `shared_slots`.
        every: from `every_row`, of T rows.
        results: [T, 1, D] float32 to write to; made if not given.

    Raises:
        ValueError: shapes, dtypes, strides, alignments or devices that do not fit.
    """
    rows, tile_rows = len(every.order), every.tile_rows
    if len(every.tiles) != -(-rows // tile_rows):
        raise ValueError(f"{rows} rows are in {len(every.tiles)} tiles, not of {tile_rows} rows")
    if results is None:
        results = torch.empty(rows, 1, slots.layout.hidden, dtype=torch.float32, device=x.device)
    # Larger tiles are a prompt's: then the tables of the routed experts fit.
    gate_up, down = (GATE_UP, DOWN) if tile_rows <= GATE_UP.largest_m else (None, None)
    hidden = expert_gate_up(x, every, experts=slots, config=gate_up)
    expert_down(hidden, every, experts=slots, results=results, config=down)
    return results[:, 0]


def gate_cases() -> tuple[GateCase, ...]:
    """8 bits in groups of 64, as `quantize` makes them, and for `down` what takes most registers.

    Gate and up of 4 bits with minima in groups of 32 fit too (182 registers on sm_90), but take as
    long to compile as all of these.
    """
    trunk = MatrixFormat(8, 64, torch.bfloat16, has_minimum=False)
    minima = MatrixFormat(4, 32, torch.bfloat16, has_minimum=True)
    return tuple(
        gate_case(
            name,
            fn,
            config,
            matrix=matrix,
            columns=columns,
            constants=constants,
            dtype=torch.bfloat16,
        )
        for name, fn, config, matrix, columns, constants in (
            ("shared_gate_up", gate_up_kernel, GATE_UP, trunk, 2048, {"A": 1}),
            ("shared_gate_up", gate_up_kernel, GATE_UP_CONFIGS[-1], trunk, 2048, {"A": 1}),
            ("shared_down", down_kernel, DOWN, trunk, 512, {}),
            ("shared_down", down_kernel, DOWN, minima, 512, {}),
            ("shared_down", down_kernel, DOWN_CONFIGS[-1], trunk, 512, {}),
        )
    )
