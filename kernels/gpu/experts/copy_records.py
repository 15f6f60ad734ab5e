"""slots[slot] = store[record] for a list of (record, slot): experts from the host to the device.

`store` may be pinned host memory, which a kernel reads over the bus through its mapped address:
`gather_records` takes the list from the device, so that a pass inside a CUDA graph fetches what its
own routing asked for. `copy_records` is the same by the copy engines, for a list on the host; it is
also the definition. The runtime has no use for either yet: its host decides what is copied
(`clover_local/experts/stream.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from clover_local.kernels.gpu.check import ALIGNMENT, check_aligned
from clover_local.kernels.gpu.gate import GateCase


@dataclass(frozen=True)
class CopyConfig:
    """Programs on the device, bytes that one has under way at once, and its warps."""

    programs: int
    chunk_bytes: int
    num_warps: int


# A bus of 55 GB/s with a round trip of 1.5 us holds 80 KB under way: 32 programs of 8 KB are three
# times that, and leave half of 70 multiprocessors alone. A chunk is 4 words a thread. Not measured.
CONFIG = CopyConfig(programs=32, chunk_bytes=8192, num_warps=4)


@triton.jit(do_not_specialize=["records", "slot_count", "most"])
def gather_records_kernel(
    store,
    slots,
    copies,
    copy_count,
    records,
    slot_count,
    most,
    RECORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Programs take turns at chunks of all copies; RECORD and CHUNK count 8-byte numbers."""
    CHUNKS: tl.constexpr = (RECORD + CHUNK - 1) // CHUNK
    count = tl.minimum(tl.load(copy_count), most)
    offset = tl.arange(0, CHUNK)
    for chunk in range(tl.program_id(0), count * CHUNKS, tl.num_programs(0)):
        copy = chunk // CHUNKS
        record = tl.load(copies + copy * 2).to(tl.int64)
        slot = tl.load(copies + copy * 2 + 1).to(tl.int64)
        # A pair that names no record or no slot is left out.
        valid = (record >= 0) & (record < records) & (slot >= 0) & (slot < slot_count)
        at = (chunk % CHUNKS) * CHUNK + offset
        inside = (at < RECORD) & valid
        words = tl.load(store + record * RECORD + at, mask=inside, other=0)
        tl.store(slots + slot * RECORD + at, words, mask=inside)


def gather_records(
    store: Tensor,
    slots: Tensor,
    *,
    copies: Tensor,
    copy_count: Tensor,
    config: CopyConfig = CONFIG,
) -> None:
    """Copies records to slots by a kernel; no slot may be named twice.

    Args:
        store: [records, record_bytes] uint8, on the device or pinned on the host.
        slots: [slots, record_bytes] uint8.
        copies: [most, 2] int32: record and slot; a pair with a number out of range does nothing.
        copy_count: [1] int32: how many of `copies` count.
        config: how many programs take turns.

    Raises:
        ValueError: shapes, dtypes, alignment or devices that do not fit.
    """
    _check_records(store, slots)
    if copies.dim() != 2 or copies.shape[1] != 2 or len(copies) == 0:
        raise ValueError(f"copies are {list(copies.shape)}, not [most, 2]")
    if copy_count.numel() != 1:
        raise ValueError(f"copy_count has {copy_count.numel()} numbers, not 1")
    for name, x in (("copies", copies), ("copy_count", copy_count)):
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} with strides {x.stride()}, not dense int32")
        if x.device != slots.device:
            raise ValueError(f"{name} is on {x.device}, the slots are on {slots.device}")
    if store.device != slots.device and not store.is_pinned():
        raise ValueError(f"the store is on {store.device} and not pinned, slots on {slots.device}")
    gather_records_kernel[(config.programs,)](
        store=store.view(torch.int64),
        slots=slots.view(torch.int64),
        copies=copies,
        copy_count=copy_count,
        records=len(store),
        slot_count=len(slots),
        most=len(copies),
        RECORD=store.shape[1] // 8,
        CHUNK=config.chunk_bytes // 8,
        num_warps=config.num_warps,
    )


def copy_records(store: Tensor, slots: Tensor, *, copies: Sequence[tuple[int, int]]) -> None:
    """Copies (record, slot) pairs by the copy engines, on the current stream, without waiting.

    Raises:
        ValueError: as `gather_records`, and numbers out of range.
    """
    _check_records(store, slots)
    for record, slot in copies:
        if not (0 <= record < len(store) and 0 <= slot < len(slots)):
            raise ValueError(
                f"record {record} to slot {slot}: there are {len(store)} and {len(slots)}"
            )
        slots[slot].copy_(store[record], non_blocking=True)


def _check_records(store: Tensor, slots: Tensor) -> None:
    for name, x in (("store", store), ("slots", slots)):
        if x.dim() != 2 or 0 in x.shape:
            raise ValueError(f"{name} is {list(x.shape)}, not [records, record_bytes]")
        if x.dtype != torch.uint8 or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} with strides {x.stride()}, not dense uint8")
        check_aligned(name, x)
    if store.shape[1] != slots.shape[1] or store.shape[1] % ALIGNMENT:
        raise ValueError(
            f"records of {store.shape[1]} bytes and slots of {slots.shape[1]}: "
            f"the same multiple of {ALIGNMENT} is needed"
        )


def gate_cases() -> tuple[GateCase, ...]:
    """The real model's record: 1,622,016 bytes with groups of 128."""
    types = {"store": "*i64", "slots": "*i64", "copies": "*i32", "copy_count": "*i32"}
    types |= dict.fromkeys(("records", "slot_count", "most"), "i32")
    return (
        GateCase(
            name="expert_copy",
            fn=gather_records_kernel,
            signature=types,
            constexprs={"RECORD": 1622016 // 8, "CHUNK": CONFIG.chunk_bytes // 8},
            num_warps=CONFIG.num_warps,
            num_stages=1,
        ),
    )
