"""Where the parts of an expert's record lie."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from clover_local.kernels.gpu.experts.record import (
    MatrixFormat,
    format_of,
    record_layout,
    write_record,
)
from clover_local.kernels.packed import PackedWeight

RoundMatrix = Callable[..., PackedWeight]
INT4 = MatrixFormat(4, 128, torch.bfloat16, False)


def test_record_of_the_real_model_has_no_gaps() -> None:
    layout = record_layout(2048, 512, gate_up=INT4, down=INT4)
    assert layout.gate_packed == 0
    assert layout.up_packed == 512 * 1024
    assert layout.gate_scale == 2 * 512 * 1024
    assert layout.up_scale == layout.gate_scale + 512 * 16 * 2
    assert layout.down_packed == layout.up_scale + 512 * 16 * 2
    assert layout.down_scale == layout.down_packed + 2048 * 256
    assert layout.nbytes == 3 * 512 * 2048 // 2 + 3 * 512 * 16 * 2 == 1_622_016


def test_parts_start_at_multiples_of_256_bytes() -> None:
    odd = MatrixFormat(4, 32, torch.bfloat16, True)
    layout = record_layout(96, 64, gate_up=odd, down=replace(odd, bits=8))
    starts = [
        layout.gate_packed,
        layout.up_packed,
        layout.gate_scale,
        layout.up_scale,
        layout.down_packed,
        layout.down_scale,
        layout.gate_minimum,
        layout.up_minimum,
        layout.down_minimum,
        layout.nbytes,
    ]
    assert all(start is not None and start % 256 == 0 for start in starts)
    assert starts == sorted(set(starts), key=lambda start: start or 0)


def test_every_part_is_written_where_the_layout_says(round_matrix: RoundMatrix) -> None:
    gate_up = round_matrix(torch.randn(2 * 32, 96), asymmetric=True)
    down = round_matrix(torch.randn(96, 32), bits=8)
    layout = record_layout(96, 32, gate_up=format_of(gate_up), down=format_of(down))
    record = torch.empty(layout.nbytes, dtype=torch.uint8)
    write_record(record, layout, gate_up=gate_up, down=down)
    assert layout.up_minimum is not None
    assert gate_up.minimum is not None
    assert layout.down_minimum is None
    for start, part in (
        (layout.gate_packed, gate_up.data[:32]),
        (layout.up_packed, gate_up.data[32:]),
        (layout.up_scale, gate_up.scale[32:]),
        (layout.up_minimum, gate_up.minimum[32:]),
        (layout.down_packed, down.data),
        (layout.down_scale, down.scale),
    ):
        found = record[start : start + part.nbytes].view(part.dtype).view(part.shape)
        assert torch.equal(found, part)


def test_what_does_not_fit_is_refused(round_matrix: RoundMatrix) -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide 96 columns"):
        record_layout(96, 512, gate_up=INT4, down=INT4)
    gate_up, down = round_matrix(torch.randn(64, 96)), round_matrix(torch.randn(96, 32))
    layout = record_layout(96, 32, gate_up=format_of(gate_up), down=format_of(down))
    record = torch.empty(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"down is \(64, 96\)"):
        write_record(record, layout, gate_up=gate_up, down=gate_up)
    with pytest.raises(ValueError, match=rf"not {layout.nbytes} bytes"):
        write_record(record[1:], layout, gate_up=gate_up, down=down)
