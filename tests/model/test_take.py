"""Parameters that are never quantized come out in float32, whatever they were."""

import pytest
import torch

from clover_local.kernels.packed import PackedWeight
from clover_local.model.take import take_float32


def test_small_parameters_become_float32() -> None:
    weights = {"norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    assert take_float32(weights.__getitem__, "norm.weight").dtype == torch.float32


def test_packed_one_is_refused_by_name() -> None:
    packed = PackedWeight(
        torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 1), None, bits=4, group_size=16
    )
    with pytest.raises(ValueError, match=r"gate\.weight is packed to 4 bits"):
        take_float32({"gate.weight": packed}.__getitem__, "gate.weight")
