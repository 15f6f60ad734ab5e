"""The bytes of a record: the layout of the kernels, and the same with gate and up as one matrix."""

import pytest
import torch
from torch import Tensor

from clover_local.experts.record import ExpertFormat, joined_layout, kernel_layout, weights_of
from clover_local.kernels.gpu.experts.record import MatrixFormat, record_layout, write_record
from clover_local.kernels.packed import PackedWeight

BF16 = torch.bfloat16
INT4 = MatrixFormat(4, 32, BF16, has_minimum=False)
INT8_MINIMUM = MatrixFormat(8, 16, torch.float32, has_minimum=True)
FORMATS = pytest.mark.parametrize(
    ("gate_up", "down"),
    [(INT4, INT4), (INT4, INT8_MINIMUM), (INT8_MINIMUM, INT4), (INT8_MINIMUM, INT8_MINIMUM)],
    ids=["INT4", "INT4-INT8", "INT8-INT4", "INT8"],
)


def matrix(stored: MatrixFormat, rows: int, columns: int) -> PackedWeight:
    groups = (rows, columns // stored.group_size)
    words = torch.randint(-(2**31), 2**31, (rows, columns * stored.bits // 32), dtype=torch.int32)
    minimum = torch.randn(groups) if stored.has_minimum else None
    scale = torch.randn(groups).to(stored.scale_dtype)
    return PackedWeight(words, scale, minimum, stored.bits, stored.group_size)


@FORMATS
def test_the_kernels_layout_is_theirs(gate_up: MatrixFormat, down: MatrixFormat) -> None:
    expected = record_layout(96, 32, gate_up=gate_up, down=down)
    layout = kernel_layout(ExpertFormat(96, 32, gate_up, down))
    assert layout is not None and layout.kernel == expected and layout.nbytes == expected.nbytes
    weights = matrix(gate_up, 64, 96), matrix(down, 96, 32)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    write_record(record, expected, gate_up=weights[0], down=weights[1])
    parts: dict[str, Tensor | None] = {
        "values": weights[1].data,
        "scale": weights[1].scale,
        "minimum": weights[1].minimum,
    }
    for field in layout.fields:
        if field.matrix == "down":
            part = parts[field.part]
            assert part is not None and torch.equal(field.of(record), part)


@FORMATS
def test_joined_parts_are_the_weights(gate_up: MatrixFormat, down: MatrixFormat) -> None:
    layout = joined_layout(ExpertFormat(96, 32, gate_up, down))
    assert layout.nbytes == record_layout(96, 32, gate_up=gate_up, down=down).nbytes
    weights = matrix(gate_up, 64, 96), matrix(down, 96, 32)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for field in layout.fields:
        whole = weights[field.matrix == "down"]
        parts = {"values": whole.data, "scale": whole.scale, "minimum": whole.minimum}
        part = parts[field.part]
        assert part is not None
        field.of(record).copy_(part[32:] if field.matrix == "up" else part[: field.shape[0]])
    for got, wanted in zip(weights_of(record, layout), weights, strict=True):
        assert isinstance(got, PackedWeight) and torch.equal(got.dequantize(), wanted.dequantize())
        assert got.data.is_contiguous() and got.data.data_ptr() % 16 == record.data_ptr() % 16


def test_plain_matrices_lie_one_after_the_other() -> None:
    layout = joined_layout(ExpertFormat(40, 28, torch.float32, torch.float32))
    assert [field.start for field in layout.fields] == [0, 4480, 8960]
    assert layout.nbytes == 3 * 4608  # each matrix as the memory plan counts it
    record = torch.arange(layout.nbytes // 4, dtype=torch.float32).view(torch.uint8)
    gate_up, down = weights_of(record, layout)
    assert isinstance(gate_up, Tensor) and gate_up.shape == (56, 40) and gate_up[1, 0] == 40
    assert isinstance(down, Tensor) and down.shape == (40, 28) and down[0, 0] == 2240
    assert kernel_layout(layout.format) is None


def test_a_packed_record_of_the_real_shape_is_the_same_in_both_layouts() -> None:
    stored = MatrixFormat(4, 128, BF16, has_minimum=False)
    real = ExpertFormat(2048, 512, stored, stored)
    joined, kernel = joined_layout(real), kernel_layout(real)
    assert kernel is not None and joined.fields == kernel.fields and joined.nbytes == 1622016
