"""Linear maps, alone and stacked."""

import torch

from clover_local.kernels.int4 import pack
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.linear import Linear


def test_stacked_weights_give_the_outputs_one_after_the_other() -> None:
    torch.manual_seed(1)
    x, first, second = torch.randn(3, 17), torch.randn(5, 17), torch.randn(7, 17)
    stacked = Linear(first, second)(x)
    torch.testing.assert_close(stacked, torch.cat([x @ first.T, x @ second.T], dim=1))


def test_single_small_weight_is_not_copied() -> None:
    weight = torch.randn(5, 17)
    assert Linear(weight).weights[0] is weight


def packed(rows: int, *, bits: int) -> PackedWeight:
    torch.manual_seed(rows)
    values = torch.randint(-8, 8, (rows, 64))
    return PackedWeight(pack(values, bits), torch.rand(rows, 2), None, bits, 32)


def test_packed_and_plain_weights_keep_their_order() -> None:
    parts: list[Weight] = [
        packed(5, bits=4),
        packed(3, bits=4),
        torch.randn(2, 64),
        packed(7, bits=8),
    ]
    linear = Linear(*parts)
    assert [weight.shape[0] for weight in linear.weights] == [8, 2, 7]
    plain = torch.cat([p if isinstance(p, torch.Tensor) else p.dequantize() for p in parts])
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x), x @ plain.T, rtol=1e-5, atol=1e-5)


def test_single_packed_weight_is_not_copied() -> None:
    weight = packed(5, bits=4)
    assert Linear(weight).weights == (weight,)
