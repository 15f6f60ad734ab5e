"""Rounding by groups, and the two ways to find a scale."""

import pytest
import torch

from clover_local.quant.rounding import (
    FindScale,
    QuantizedWeight,
    absmax_scale,
    round_to_nearest,
    searched_scale,
)


@pytest.mark.parametrize(
    ("bits", "group_size", "shape"),
    [(4, 32, (7, 96)), (4, 5, (3, 35)), (8, 64, (2, 3, 128))],
    ids=["4-g32", "4-g5", "8-g64-batched"],
)
def test_rounding_is_that_of_its_formula(
    bits: int, group_size: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape).bfloat16()
    quantized = round_to_nearest(weight, bits=bits, group_size=group_size)
    half = 2 ** (bits - 1)
    rows = weight.flatten(0, -2).tolist()
    values = quantized.values.flatten(0, -2).tolist()
    scales = quantized.scale.flatten(0, -2)
    for row, got, scale in zip(rows, values, scales, strict=True):
        for start in range(0, shape[-1], group_size):
            group = row[start : start + group_size]
            largest = torch.tensor(max(map(abs, group)))
            expected = (largest * 2 / (2**bits - 1)).bfloat16()
            assert scale[start // group_size] == expected
            for value, stored in zip(group, got[start : start + group_size], strict=True):
                nearest = round(float(torch.tensor(value) / expected.float()))
                assert stored == min(max(nearest, -half), half - 1)


def test_no_weight_is_off_by_more_than_half_a_step_but_for_the_largest() -> None:
    torch.manual_seed(2)
    weight = torch.randn(33, 128)
    quantized = round_to_nearest(weight, group_size=64)
    off = (weight - quantized.dequantize()).reshape(33, 2, 64)
    steps = off / quantized.scale[..., None]
    clamped = quantized.values.reshape(33, 2, 64) == 7
    assert float(steps[~clamped].abs().max()) <= 0.5 + 1e-6
    assert float(steps.abs().max()) <= 0.55


def test_group_of_zeros_gets_scale_1_and_no_value() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 32:] = 1.0
    for find_scale in (absmax_scale, searched_scale):
        quantized = round_to_nearest(weight, group_size=32, find_scale=find_scale)
        assert quantized.scale[0].tolist() == [1.0, 1.0]
        assert not quantized.values[0].any()
        assert torch.isfinite(quantized.dequantize()).all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e30, 3.3e38])
@pytest.mark.parametrize("find_scale", [absmax_scale, searched_scale])
def test_extreme_weights_stay_finite(size: float, find_scale: FindScale) -> None:
    weight = torch.tensor([[size, -size, 0.0, size / 3] * 8])
    quantized = round_to_nearest(weight, group_size=16, find_scale=find_scale)
    assert torch.isfinite(quantized.scale).all()
    assert (quantized.scale > 0).all()
    assert torch.isfinite(quantized.dequantize()).all()


def test_searched_scale_costs_less_where_it_matters() -> None:
    torch.manual_seed(3)
    weight = torch.randn(50, 64)
    weight[:, 5] *= 6  # an outlier in a column that hardly counts
    importance = torch.ones(64)
    importance[5] = 1e-3

    def cost(quantized: QuantizedWeight) -> torch.Tensor:
        return ((weight - quantized.dequantize()).square() * importance).sum(1)

    plain = round_to_nearest(weight, group_size=32)
    searched = round_to_nearest(
        weight, group_size=32, find_scale=searched_scale, importance=importance
    )
    assert (cost(searched) <= cost(plain)).all()
    assert float(cost(searched).sum()) < 0.8 * float(cost(plain).sum())


def test_pack_keeps_every_weight() -> None:
    torch.manual_seed(4)
    quantized = round_to_nearest(torch.randn(2, 5, 64), group_size=16)
    first, second = quantized.unbind()
    assert torch.equal(first.pack().dequantize(), quantized.dequantize()[0])
    assert torch.equal(second.pack().dequantize(), quantized.dequantize()[1])
    with pytest.raises(ValueError, match=r"\(2, 5, 64\)"):
        quantized.pack()


@pytest.mark.parametrize(
    ("bits", "group_size", "message"),
    [(3, 32, "3 bits"), (4, 48, "48 does not divide the 64"), (4, 0, "0 does not divide the 64")],
)
def test_impossible_formats_are_wrong_calls(bits: int, group_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        round_to_nearest(torch.ones(2, 64), bits=bits, group_size=group_size)
