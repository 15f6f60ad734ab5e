"""The computed hours: what they follow from, and the real model's sizes."""

from dataclasses import replace
from types import ModuleType

import pytest

from clover_local.checkpoint.parameters import count_parameters
from clover_local.quant.profiles import Choices, resolve


def test_the_sizes_are_those_of_the_real_model(quantization_cost: ModuleType) -> None:
    total = count_parameters(quantization_cost.REAL, diffusion=True).total
    assert total == pytest.approx(34.66e9, rel=1e-3)


def test_twice_the_text_takes_twice_as_long_but_for_the_rounding(
    quantization_cost: ModuleType,
) -> None:
    config = quantization_cost.REAL
    recipe, _ = resolve(Choices(), config, device="cpu")
    rates = quantization_cost.Rates(product=1e11, packed=1e11, expert=1.0)
    once = quantization_cost.hours(config, recipe, rates)
    longer = replace(recipe, calibration_tokens=2 * recipe.calibration_tokens)
    twice = quantization_cost.hours(config, longer, rates)
    assert twice.hessians == pytest.approx(2 * once.hessians)
    assert twice.running == pytest.approx(2 * once.running)
    assert once.rounding == twice.rounding == pytest.approx(40 * 256 / 3600)
    assert once.comparing == twice.comparing
    assert once.reading < twice.reading < 2 * once.reading


def test_a_faster_machine_takes_less_of_everything_but_reading(
    quantization_cost: ModuleType,
) -> None:
    config = quantization_cost.REAL
    recipe, _ = resolve(Choices(), config, device="cpu")
    slow, fast = (
        quantization_cost.hours(
            config, recipe, quantization_cost.Rates(rate * 1e11, rate * 2e11, 1.0 / rate)
        )
        for rate in (1.0, 4.0)
    )
    for part in ("hessians", "rounding", "running", "comparing"):
        assert getattr(slow, part) == pytest.approx(4 * getattr(fast, part))
    assert slow.reading == fast.reading
