"""GPTQ against the textbook's loop over columns, and on inputs that are not as in the textbook."""

import pytest
import torch
from torch import Tensor

from clover_local.quant.gptq import gptq_quantize
from clover_local.quant.hessian import outer, relative_error, shrink
from clover_local.quant.rounding import FindScale, absmax_scale, round_to_nearest, searched_scale


def correlated_rows(rows: int, columns: int, *, seed: int = 1) -> Tensor:
    """Inputs of few directions, as hidden states have them."""
    generator = torch.Generator().manual_seed(seed)
    few = max(columns // 8, 1)
    mixing = torch.randn(few, columns, generator=generator, dtype=torch.float64)
    common = torch.randn(rows, few, generator=generator, dtype=torch.float64) @ mixing
    return common + 0.3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def random_weight(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_hessian(rows: int, columns: int, *, seed: int = 1) -> Tensor:
    x = correlated_rows(rows, columns, seed=seed)
    return x.T @ x / rows


def textbook(
    weight: Tensor, hessian: Tensor, *, bits: int, group_size: int, damp: float
) -> tuple[Tensor, Tensor]:
    """Frantar et al. 2022, algorithm 1 without blocks: values [N, K] and scales [N, G]."""
    weight, hessian = weight.clone(), hessian.clone()
    half = 2 ** (bits - 1)
    columns = weight.shape[1]
    dead = hessian.diagonal() == 0
    mean = hessian.diagonal()[~dead].mean()
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    hessian += damp * mean * torch.eye(columns, dtype=hessian.dtype)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    values, scales = [], []
    for column in range(columns):
        if column % group_size == 0:
            group = weight[:, column : column + group_size]
            scale = (group.abs().amax(1) * 2 / (2**bits - 1)).bfloat16()
            scales.append(torch.where(scale == 0, 1, scale))
        step = scales[-1].double()
        rounded = torch.round(weight[:, column] / step).clamp(-half, half - 1)
        error = (weight[:, column] - rounded * step) / inverse[column, column]
        weight[:, column:] -= error[:, None] * inverse[column, column:]
        values.append(rounded)
    return torch.stack(values, 1), torch.stack(scales, 1)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 500])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "bits"),
    [(5, 96, 32, 4), (3, 90, 15, 4), (4, 66, 66, 4), (2, 64, 4, 4), (3, 70, 35, 8), (1, 1, 1, 4)],
    ids=lambda value: str(value),
)
def test_equals_the_textbook_in_float64(
    rows: int, columns: int, group_size: int, bits: int, block_size: int
) -> None:
    weight, hessian = random_weight(rows, columns), mean_hessian(2 * columns, columns)
    expected, scales = textbook(weight, hessian, bits=bits, group_size=group_size, damp=0.01)
    result = gptq_quantize(weight, hessian, bits=bits, group_size=group_size, block_size=block_size)
    assert torch.equal(result.weight.values.double(), expected)
    assert torch.equal(result.weight.scale, scales)


@pytest.mark.parametrize("find_scale", [absmax_scale, searched_scale])
@pytest.mark.parametrize("bits", [4, 8])
def test_identity_hessian_equals_rounding_bit_for_bit(bits: int, find_scale: FindScale) -> None:
    weight = random_weight(2, 9, 96).bfloat16()
    rounded = round_to_nearest(weight, bits=bits, group_size=32, find_scale=find_scale)
    result = gptq_quantize(
        weight,
        torch.eye(96).expand(2, 96, 96),
        bits=bits,
        group_size=32,
        find_scale=find_scale,
    )
    assert torch.equal(result.weight.values, rounded.values)
    assert torch.equal(result.weight.scale, rounded.scale)


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("find_scale", [absmax_scale, searched_scale])
def test_loses_at_most_0_6_of_what_rounding_loses(group_size: int, find_scale: FindScale) -> None:
    x = correlated_rows(900, 256).float()
    weight = random_weight(48, 256).float()
    hessian = outer(x[:600])
    result = gptq_quantize(weight, hessian, group_size=group_size, find_scale=find_scale)
    rounded = round_to_nearest(weight, group_size=group_size)
    for seen in (hessian, outer(x[600:])):
        assert float(relative_error(weight, result.weight.dequantize(), seen)) <= 0.6 * float(
            relative_error(weight, rounded.dequantize(), seen)
        )


def test_batched_equals_one_by_one() -> None:
    weight = random_weight(2, 3, 5, 48)
    hessian = torch.stack([mean_hessian(100, 48, seed=seed) for seed in range(6)])
    hessian = hessian.view(2, 3, 48, 48)
    together = gptq_quantize(weight, hessian, group_size=16)
    assert together.damp.shape == together.dead.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = gptq_quantize(weight[i, j], hessian[i, j], group_size=16)
            assert torch.equal(alone.weight.values, together.weight.values[i, j])
            assert torch.equal(alone.weight.scale, together.weight.scale[i, j])


def test_scale_of_the_hessian_changes_nothing() -> None:
    weight, hessian = random_weight(7, 64), mean_hessian(30, 64)
    once = gptq_quantize(weight, hessian, group_size=32)
    for factor in (2.0**-100, 2.0**90):
        again = gptq_quantize(weight, hessian * factor, group_size=32)
        assert torch.equal(once.weight.values, again.weight.values)


def test_dead_inputs_become_0_and_are_counted() -> None:
    x = correlated_rows(200, 48)
    x[:, [3, 17, 40]] = 0
    weight, hessian = random_weight(5, 48), x.T @ x
    result = gptq_quantize(weight, hessian, group_size=16)
    assert int(result.dead) == 3
    assert not result.weight.values[:, [3, 17, 40]].any()
    expected, _ = textbook(weight, hessian, bits=4, group_size=16, damp=0.01)
    assert torch.equal(result.weight.values.double(), expected)


def test_damping_rises_only_where_a_hessian_is_not_positive_definite() -> None:
    hessian = torch.stack([mean_hessian(100, 32), mean_hessian(100, 32)])
    hessian[1] -= 0.05 * hessian[1].diagonal().mean() * torch.eye(32)
    assert float(torch.linalg.eigvalsh(hessian[1]).min()) < -0.01
    weight = random_weight(2, 5, 32)
    result = gptq_quantize(weight, hessian, group_size=16, damp=0.01)
    assert result.damp.tolist() == pytest.approx([0.01, 0.1])
    alone = gptq_quantize(weight[1], hessian[1], group_size=16, damp=0.1)
    assert torch.equal(result.weight.values[1], alone.weight.values)


def test_expert_without_tokens_is_quantized_by_what_the_layer_saw() -> None:
    x = correlated_rows(300, 64).float()
    own = torch.stack([outer(x[:0]), outer(x[:7]), outer(x[7:])])
    hessian = shrink(
        own,
        rows=torch.tensor([0, 7, 293]),
        pooled=own.sum(0),
        pooled_rows=300,
        prior_rows=64,
    )
    weight = random_weight(3, 6, 64).float()
    result = gptq_quantize(weight, hessian, group_size=32)
    pooled = gptq_quantize(weight[0], own.sum(0) / 300, group_size=32)
    assert torch.equal(result.weight.values[0], pooled.weight.values)
    assert result.damp.tolist() == pytest.approx([0.01] * 3)
    rounded = round_to_nearest(weight, group_size=32)
    ratio = relative_error(weight, result.weight.dequantize(), hessian) / relative_error(
        weight, rounded.dequantize(), hessian
    )
    assert (ratio < 0.8).all()


def test_hessian_of_zeros_rounds_and_calls_every_input_dead() -> None:
    weight = random_weight(5, 32).float()
    result = gptq_quantize(weight, torch.zeros(32, 32), group_size=16)
    assert int(result.dead) == 32
    assert torch.equal(result.weight.values, round_to_nearest(weight, group_size=16).values)


@pytest.mark.parametrize("weight_size", [0.0, 1e-40, 1e-3, 1e30])
@pytest.mark.parametrize("hessian_size", [1e-30, 1.0, 1e33])
@pytest.mark.parametrize("seen", [1, 20, 400])
def test_finite_inputs_give_finite_weights(
    weight_size: float, hessian_size: float, seen: int
) -> None:
    weight = (random_weight(6, 40) * weight_size).float()
    weight[2] = 0
    weight[3, ::2] *= 1000
    x = correlated_rows(seen, 40)
    x[:, 11] = 0
    hessian = (x.T @ x / seen * hessian_size).float()
    for find_scale in (absmax_scale, searched_scale):
        result = gptq_quantize(weight, hessian, group_size=8, find_scale=find_scale)
        assert torch.isfinite(result.weight.dequantize()).all()
        assert (result.weight.scale > 0).all()
        assert not result.weight.values[2].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 48}, "48 does not divide the 64"),
        ({"bits": 5}, "5 bits"),
        ({"damp": 0.0}, "damp 0.0"),
        ({"block_size": 0}, "block_size 0"),
        ({"hessian": torch.eye(63)}, r"\(63, 63\) for weights of \(2, 64\)"),
        ({"hessian": torch.full((64, 64), torch.nan)}, "positive definite"),
        ({"hessian": torch.full((64, 64), torch.inf)}, "positive definite"),
    ],
    ids=["group", "bits", "damp", "block", "shape", "nan", "inf"],
)
def test_impossible_calls_are_refused(arguments: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"hessian": torch.eye(64), "group_size": 32, **arguments}
    with pytest.raises(ValueError, match=message):
        gptq_quantize(torch.ones(2, 64), **call)  # type: ignore[arg-type]
