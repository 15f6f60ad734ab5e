"""Records read from files are the experts that the checkpoint has, in the order of its bytes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clover_local.checkpoint.read import read_experts
from clover_local.checkpoint.summary import summarize
from clover_local.errors import CheckpointError
from clover_local.experts.record import weights_of
from clover_local.experts.store import ExpertStore
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.memory.model_bytes import from_summary
from tests.experts.conftest import Disk, OnDisk, WriteExperts

RoundMatrix = Callable[..., PackedWeight]


def store_of(on_disk: OnDisk, *, disk: Disk | None = None) -> ExpertStore:
    return ExpertStore(
        on_disk.checkpoint, on_disk.config, device="cpu", dtype=torch.float32, reader=disk
    )


def read(store: ExpertStore, layer: int, expert: int) -> tuple[Weight, Weight]:
    layout = store.layouts(layer)[expert]
    record = torch.empty(layout.nbytes, dtype=torch.uint8)
    store.read(layer, expert, into=record)
    return weights_of(record, layout)


def dense(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight.float()


def check(on_disk: OnDisk) -> None:
    """Every record holds the numbers that `read_experts` reads, and has the planned size."""
    store, config = store_of(on_disk), on_disk.config
    for layer in range(config.num_hidden_layers):
        expected = read_experts(on_disk.checkpoint, config, layer, range(config.num_experts))
        for expert, weights in enumerate(zip(*expected, strict=True)):
            for got, wanted in zip(read(store, layer, expert), weights, strict=True):
                assert torch.equal(dense(got), dense(wanted))
                assert isinstance(got, PackedWeight) == isinstance(wanted, PackedWeight)


def test_plain_and_packed_records_are_the_experts(golden: OnDisk, quantized: OnDisk) -> None:
    check(golden)
    check(quantized)


def test_every_format_is_read(
    write_experts: WriteExperts, round_matrix: RoundMatrix, tmp_path: Path
) -> None:
    def stored(layer: int, expert: int, name: str, matrix: Tensor) -> Weight:
        if layer == 0:
            return matrix if expert % 2 else matrix.float()
        packed = round_matrix(matrix, bits=4 if layer == 1 else 8, asymmetric=expert % 3 > 0)
        if expert % 3 < 2 or packed.minimum is None:
            return packed  # symmetric, or with zero points
        minimum = packed.minimum + 0.3 * packed.scale.float()  # no whole multiples of the scale
        return PackedWeight(packed.data, packed.scale, minimum, packed.bits, packed.group_size)

    on_disk = write_experts(tmp_path, stored)
    assert any(name.endswith("_zero_point") for name in on_disk.checkpoint.tensors)
    assert any(name.endswith("_min") for name in on_disk.checkpoint.tensors)
    check(on_disk)


def test_slots_have_the_size_that_the_memory_plan_counts(golden: OnDisk, quantized: OnDisk) -> None:
    for on_disk in (golden, quantized):
        planned = from_summary(on_disk.config, summarize(on_disk.checkpoint), number_bytes=4)
        store = store_of(on_disk)
        assert store.record_bytes == planned.slot_bytes
        assert store.nbytes == planned.experts


def test_an_expert_in_one_piece_needs_few_reads_and_in_order_the_files_are_read_forwards(
    write_experts: WriteExperts, round_matrix: RoundMatrix, tmp_path: Path
) -> None:
    on_disk = write_experts(tmp_path, lambda layer, expert, name, w: round_matrix(w, group_size=16))
    disk = Disk(on_disk.checkpoint)
    store = store_of(on_disk, disk=disk)
    keys = [(layer, n) for n in range(store.num_experts) for layer in range(store.num_layers)]
    for key in sorted(keys, key=lambda key: store.place_in_files(*key)):
        before = len(disk.reads)
        read(store, *key)
        assert len(disk.reads) == before + 1  # every part is a multiple of 256 bytes
    ends = 0
    for _, start, nbytes in disk.reads:
        assert start == ends or ends == 0
        ends = start + nbytes


def test_a_record_of_a_truncated_file_is_one_clear_line(
    write_experts: WriteExperts, round_matrix: RoundMatrix, tmp_path: Path
) -> None:
    on_disk = write_experts(tmp_path, lambda layer, expert, name, w: round_matrix(w))
    store = store_of(on_disk)
    path = on_disk.checkpoint.shards[0].path
    whole = path.read_bytes()
    os.truncate(path, store.place_in_files(1, 3)[1] + 100)
    read(store, 1, 2)
    with pytest.raises(CheckpointError, match="ends too early"):
        read(store, 1, 3)
    path.write_bytes(whole)
    read(store, 1, 3)


def test_a_failing_read_is_passed_on(quantized: OnDisk) -> None:
    disk = Disk(quantized.checkpoint)
    disk.fails_at, disk.error = 0, CheckpointError(os.strerror(errno.EIO))
    store = store_of(quantized, disk=disk)
    with pytest.raises(CheckpointError, match="Input/output error"):
        read(store, 0, 0)
    read(store, 0, 0)
