"""Packed weights: what they stand for, what cannot be one, and stacking without copies."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.kernels.int4 import pack
from clover_local.kernels.packed import PackedWeight, same_format, stack


def weight(
    rows: int = 3, *, bits: int = 4, minimum: bool = False, scale: torch.dtype = torch.bfloat16
) -> PackedWeight:
    """[rows, 32] in groups of 16."""
    generator = torch.Generator().manual_seed(rows)
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (rows, 32), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, 2, generator=generator).to(scale)
    minima = torch.randn(rows, 2, generator=generator) if minimum else None
    return PackedWeight(pack(values, bits), scales, minima, bits, 16)


def test_a_symmetric_weight_is_value_times_scale() -> None:
    data = pack(torch.tensor([[-8, 7, 1, 0, 2, -1, 3, 4]]), 4)
    packed = PackedWeight(data, torch.tensor([[0.5, 2.0]]), None, 4, 4)
    assert packed.dequantize().tolist() == [[-4.0, 3.5, 0.5, 0.0, 4.0, -2.0, 6.0, 8.0]]
    assert (packed.shape, packed.nbytes) == ((1, 8), 4 + 8)


def test_an_asymmetric_weight_is_its_minimum_plus_stored_times_scale() -> None:
    data = pack(torch.tensor([[-128, 127, 0, -127]]), 8)
    minimum = torch.tensor([[-10.0]])
    packed = PackedWeight(data, torch.tensor([[0.5]]), minimum, 8, 4)
    assert packed.dequantize().tolist() == [[-10.0, 117.5, 54.0, -9.5]]
    assert packed.nbytes == 4 + 4 + 4


DATA = torch.zeros(3, 4, dtype=torch.int32)
SCALE = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ((DATA, SCALE, None, 3, 16), "3 bits, the widths are 4 and 8"),
        ((DATA.long(), SCALE, None, 4, 16), r"data are torch\.int64"),
        ((DATA, SCALE.double(), None, 4, 16), r"scales torch\.float64"),
        (
            (DATA, SCALE, None, 4, 8),
            r"scales are \(3, 2\) for a weight of \(3, 32\) in groups of 8",
        ),
        ((DATA, SCALE, None, 4, 0), "in groups of 0"),
        ((DATA, SCALE, None, 4, 15), "in groups of 15"),
        ((DATA, SCALE, torch.ones(3, 1), 4, 16), r"minima are torch\.float32 \(3, 1\)"),
        ((DATA, SCALE, SCALE.half(), 4, 16), r"minima are torch\.float16"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PackedWeight(*parts)


@pytest.mark.parametrize("minimum", [False, True], ids=["symmetric", "asymmetric"])
def test_stacking_puts_one_below_the_other(minimum: bool) -> None:
    parts = [weight(rows, minimum=minimum) for rows in (3, 1, 5)]
    stacked = stack(parts)
    assert stacked.shape == (9, 32)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stacked.dequantize(), expected)


@pytest.mark.parametrize("minimum", [False, True], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("chosen", [slice(1, None), torch.tensor([2, 0])], ids=["slice", "order"])
def test_rows_are_those_of_the_whole(minimum: bool, chosen: slice | Tensor) -> None:
    whole = weight(rows=3, minimum=minimum)
    assert torch.equal(whole.rows(chosen).dequantize(), whole.dequantize()[chosen])


def test_neighbours_in_memory_become_a_view() -> None:
    whole = weight(8)

    def rows(start: int, end: int) -> PackedWeight:
        return PackedWeight(whole.data[start:end], whole.scale[start:end], None, 4, 16)

    stacked = stack([rows(1, 3), rows(3, 7)])
    assert stacked.data.data_ptr() == whole.data[1:].data_ptr()
    assert stacked.scale.data_ptr() == whole.scale[1:].data_ptr()
    assert torch.equal(stacked.dequantize(), whole.dequantize()[1:7])
    swapped = stack([rows(3, 7), rows(1, 3)])
    expected = torch.cat([whole.dequantize()[3:7], whole.dequantize()[1:3]])
    assert torch.equal(swapped.dequantize(), expected)


@pytest.mark.parametrize(
    "other",
    [
        weight(bits=8),
        weight(minimum=True),
        weight(scale=torch.float16),
        replace(weight(), scale=torch.ones(3, 1).bfloat16(), group_size=32),
        torch.ones(3, 32),
    ],
    ids=["bits", "minimum", "scale", "group", "plain"],
)
def test_other_formats_cannot_be_stacked(other: PackedWeight | Tensor) -> None:
    assert not same_format(weight(), other)
    if isinstance(other, PackedWeight):
        with pytest.raises(ValueError, match="different formats"):
            stack([weight(), other])


def test_on_its_own_device_nothing_is_copied() -> None:
    packed = weight(minimum=True)
    same = packed.to("cpu")
    assert same.data is packed.data and same.scale is packed.scale
    assert packed.to("meta").data.device.type == "meta"
    moved = packed.to("meta").minimum
    assert moved is not None and moved.device.type == "meta"
