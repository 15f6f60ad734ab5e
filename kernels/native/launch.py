"""Products with packed weights by compiled kernels: what a kernel needs to know, as integers."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_local.kernels.choice import VARIABLE, reference_only
from clover_local.kernels.native.build import Kernel, Missing, build, find_target
from clover_local.kernels.native.fields import Call, Job, Spread
from clover_local.kernels.native.matmul import JOB_ROWS
from clover_local.kernels.native.parallel import run
from clover_local.kernels.native.unpack import ScaleKind, Variant
from clover_local.kernels.packed import PackedWeight

BLOCK, LEAST_BLOCK = 128, 32
"""Rows of a weight that a thread takes at a time: many, for each start costs a wait for memory."""
SHARES = 4
"""Blocks that each thread should get at least, so that all end at about the same time."""
AHEAD_BYTES = 8192
"""Words are asked for this long, or a tile, before they are used."""
CHUNK_COLUMNS = 512
"""Columns that are unpacked at a time: those of a tile's weights fit into the fastest cache."""
MOST_CHUNK_COLUMNS = 16384
"""Larger groups are not unpacked ahead: the scratch lies on a thread's stack."""
SPREAD_ELEMENTS = 1 << 16
"""From here on more than one thread prepares x."""
SMALL_WORK = 1 << 17
"""Products of weights and activations up to which one thread is faster than waking others."""

SCALE_KINDS: dict[torch.dtype, ScaleKind] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}

Integers = NDArray[np.int64]
Jobs = Integers  # [jobs, len(Job)]


@dataclass(frozen=True)
class Format:
    """What all weights of one parallel call have in common."""

    bits: int
    scale: torch.dtype
    symmetric: bool
    group_size: int
    shape: tuple[int, int]  # N, K


def format_of(weight: PackedWeight) -> Format:
    """The format of a weight."""
    return Format(
        weight.bits, weight.scale.dtype, weight.minimum is None, weight.group_size, weight.shape
    )


def kernel_for(weight: PackedWeight) -> Kernel | Missing:
    """The compiled kernel for a weight, or why there is none."""
    if reference_only():
        return Missing(f"{VARIABLE}=reference")
    target = find_target()
    if isinstance(target, Missing):
        return target
    if weight.data.device.type != "cpu":
        return Missing(f"the weights are on {weight.data.device.type}")
    unit = target.shape.lanes * 8 // weight.bits
    if weight.group_size % unit:
        return Missing(f"groups of {weight.group_size} are no multiple of {unit}")
    parts = (weight.data, weight.scale, weight.minimum)
    if not all(part is None or part.is_contiguous() for part in parts):
        return Missing("the weights are not contiguous")
    return build(
        Variant(weight.bits, SCALE_KINDS[weight.scale.dtype], weight.minimum is None), target
    )


def pointers(weight: PackedWeight) -> tuple[int, int, int]:
    """Addresses of the words, the scales and the minima."""
    minimum = 0 if weight.minimum is None else weight.minimum.data_ptr()
    return weight.data.data_ptr(), weight.scale.data_ptr(), minimum


def jobs_for(first: Integers, rows: Integers, *, weights: Integers) -> Jobs:
    """Jobs for weights [W, 3] (see `pointers`): each makes `rows` [W] rows of y, from `first` [W].

    Long runs of rows are cut into jobs of JOB_ROWS.
    """
    parts = -(-rows // JOB_ROWS)
    part = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    jobs = np.empty((len(part), len(Job)), np.int64)
    jobs[:, Job.FIRST] = np.repeat(first, parts) + part * JOB_ROWS
    jobs[:, Job.ROWS] = np.minimum(np.repeat(rows, parts) - part * JOB_ROWS, JOB_ROWS)
    jobs[:, Job.DATA :] = np.repeat(weights, parts, axis=0)
    return jobs


def spread(kernel: Kernel, x: Tensor, *, bits: int) -> Tensor:
    """`x` [T, K] float32 with its columns in the order in which the kernel reads them."""
    if x.stride(1) != 1:
        x = x.contiguous()
    if bits == 8:
        return x
    rows, columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = _integers(
        {
            Spread.TAKEN: 0,
            Spread.ROWS: rows,
            Spread.X: x.data_ptr(),
            Spread.X_STRIDE: 4 * x.stride(0),
            Spread.K: columns,
            Spread.OUT: out.data_ptr(),
        }
    )
    run(kernel.spread, call, tasks=rows if rows * columns > SPREAD_ELEMENTS else 1)
    return out


def multiply(
    kernel: Kernel, jobs: Jobs, *, layout: Format, x: Tensor, x_rows: Tensor, out: Tensor
) -> None:
    """Runs jobs: row r of `out` is row `x_rows[r]` of `x` times the job's weight.

    Args:
        layout: of all weights.
        x: [T, K] float32, from `spread`.
        x_rows: [R] int64.
        out: [R, N] float32; rows that no job makes stay as they are.
    """
    n, k = layout.shape
    block = _block(n * len(jobs))
    blocks = -(-n // block)
    if layout.group_size <= MOST_CHUNK_COLUMNS:
        direct_rows = kernel.target.shape.direct_rows
        chunk_groups = max(1, CHUNK_COLUMNS // layout.group_size)
    else:
        direct_rows, chunk_groups = JOB_ROWS, 0
    row_bytes = k * layout.bits // 8
    tile_bytes = row_bytes * kernel.target.shape.weight_rows
    call = _integers(
        {
            Call.TAKEN: 0,
            Call.TILES: blocks * len(jobs),
            Call.JOBS: jobs.ctypes.data,
            Call.BLOCKS: blocks,
            Call.BLOCK: block,
            Call.N: n,
            Call.K: k,
            Call.ROW_BYTES: row_bytes,
            Call.GROUPS: k // layout.group_size,
            Call.GROUP_BYTES: layout.group_size * layout.bits // 8,
            Call.AHEAD: tile_bytes * max(1, AHEAD_BYTES // tile_bytes),
            Call.DIRECT_ROWS: direct_rows,
            Call.CHUNK_GROUPS: chunk_groups,
            Call.X: x.data_ptr(),
            Call.X_STRIDE: 4 * x.stride(0),
            Call.X_ROWS: x_rows.data_ptr(),
            Call.Y: out.data_ptr(),
            Call.Y_STRIDE: 4 * out.stride(0),
        }
    )
    small = len(x_rows) * n * k <= SMALL_WORK
    run(kernel.worker, call, tasks=1 if small else blocks * len(jobs))


def _block(rows: int) -> int:
    """How many of all `rows` of the weights a thread takes at a time."""
    share = rows // (SHARES * torch.get_num_threads())
    return min(max(share // LEAST_BLOCK, 1) * LEAST_BLOCK, BLOCK)


def _integers(fields: dict[int, int]) -> ctypes.Array[ctypes.c_int64]:
    """The fields, given in the order of their numbers, in memory."""
    return (ctypes.c_int64 * len(fields))(*fields.values())
