"""Packed weights in other groups."""

import pytest
import torch

from clover_local.checkpoint.regroup import as_int8, for_device
from clover_local.kernels.packed import PackedWeight
from tests.conftest import RoundMatrix


@pytest.fixture
def weight(round_matrix: RoundMatrix) -> PackedWeight:
    """INT8 in groups of 16, one of them zero."""
    matrix = torch.randn(6, 96, generator=torch.Generator().manual_seed(2))
    matrix[2, :32] = 0
    return round_matrix(matrix, bits=8, group_size=16)


def test_int8_is_the_nearest_within_half_a_step(weight: PackedWeight) -> None:
    wider = as_int8(weight, group_size=32)
    assert (wider.bits, wider.group_size, wider.minimum) == (8, 32, None)
    step = wider.scale.repeat_interleave(32, 1)
    difference = (wider.dequantize() - weight.dequantize()).abs()
    assert bool((difference <= 0.5001 * step).all())
    assert bool((wider.dequantize()[2, :32] == 0).all())


def test_only_a_gpu_gets_other_groups_and_only_for_small_ones(
    weight: PackedWeight, round_matrix: RoundMatrix
) -> None:
    gpu = torch.device("cuda")
    assert for_device(weight, torch.device("cpu")) is weight
    assert for_device(weight, gpu).group_size == 32
    usual = round_matrix(torch.ones(2, 64), bits=4, group_size=64)
    assert for_device(usual, gpu) is usual
