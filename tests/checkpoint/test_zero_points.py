"""Zero points: the layout by hand, and minima that come back bit for bit."""

from collections.abc import Callable

import pytest
import torch

from clover_local.checkpoint.zero_points import packed_minimum, zero_points_of
from clover_local.kernels.int4 import pack
from clover_local.kernels.packed import PackedWeight

RoundMatrix = Callable[..., PackedWeight]


def test_the_first_row_lies_in_the_lowest_bits() -> None:
    words = torch.tensor([[0x76543210, 0x0000000F]], dtype=torch.int32)  # 8 rows, 2 groups
    scale = torch.tensor([[0.5, 2.0]]).expand(8, 2)
    minimum = packed_minimum(words, scale, bits=4)
    assert minimum[:, 0].tolist() == [-0.5 * zero for zero in range(8)]
    assert minimum[:, 1].tolist() == [-30.0] + [0.0] * 7


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 13])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96])
def test_minima_come_back_bit_for_bit(
    round_matrix: RoundMatrix, rows: int, bits: int, columns: int
) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight = round_matrix(values, bits=bits, asymmetric=True)
    zero_points = zero_points_of(weight)
    assert zero_points is not None and weight.minimum is not None
    assert zero_points.shape == (-(-rows * bits // 32), columns // 32)
    assert torch.equal(packed_minimum(zero_points, weight.scale, bits=bits), weight.minimum)


@pytest.mark.parametrize(
    "minimum", [-0.3, -8.0, 0.5], ids=["no multiple", "zero of 16", "zero below 0"]
)
def test_minima_that_are_no_zero_point_have_none(minimum: float) -> None:
    data = pack(torch.zeros(1, 8, dtype=torch.int8), 4)
    scale = torch.tensor([[0.5]])
    assert zero_points_of(PackedWeight(data, scale, torch.tensor([[minimum]]), 4, 8)) is None


def test_a_symmetric_weight_has_no_zero_points(round_matrix: RoundMatrix) -> None:
    assert zero_points_of(round_matrix(torch.ones(3, 32))) is None
