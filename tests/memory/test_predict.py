"""Predicted speed: the floor of the specification, launches, and missing experts."""

from dataclasses import replace

import pytest

from clover_local.memory.model_bytes import ModelBytes
from clover_local.memory.parts import Budget, Plan
from clover_local.memory.planner import plan
from clover_local.memory.predict import Prediction, Rates, floor_bytes, predict
from clover_local.memory.sizes import GIB, MIB

TARGET = Budget(device=15360 * MIB, host=30 * GIB, context=8192)
RATES = Rates(device=896e9, link=52e9)
LAUNCHES = 1.2  # ms


def made(model: ModelBytes, **changes: int) -> Plan:
    return plan(model, replace(TARGET, **changes))  # type: ignore[arg-type]


def speed(model: ModelBytes, **changes: int) -> Prediction:
    return predict(made(model, **changes), RATES)


@pytest.mark.parametrize(("distinct", "gigabytes"), [(8, 2.61), (49, 5.3), (70, 6.64), (100, 8.58)])
def test_the_floor_is_that_of_the_specification(
    real_model: ModelBytes, distinct: int, gigabytes: float
) -> None:
    floor = floor_bytes(real_model, distinct=distinct, committed=0)
    assert floor / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_a_whole_model_takes_the_floor_and_launches(real_model: ModelBytes) -> None:
    found = speed(real_model, device=32 * GIB)
    for ms, distinct in (
        (found.ms_per_ar_token, 8),
        (found.ms_per_preview, 70),
        (found.ms_per_first_preview, 70),
        (found.ms_per_commit, 100),
        (found.ms_per_draft_round / 2, 49),
    ):
        floor = floor_bytes(real_model, distinct=distinct, committed=8192) / 896e9
        assert ms == pytest.approx(1000 * floor + LAUNCHES)
    assert found.ar == pytest.approx(1000 / found.ms_per_ar_token)


def test_one_percent_of_misses_costs_what_the_specification_says(real_model: ModelBytes) -> None:
    mine = made(real_model)
    later = speed(real_model).ms_per_preview - speed(real_model, device=32 * GIB).ms_per_preview
    percent = 100 * 0.04 * (1 - mine.resident_share)
    assert later / percent == pytest.approx(0.87, rel=0.01)


def test_a_draft_round_of_code_yields_the_tokens_that_were_measured(
    real_model: ModelBytes,
) -> None:
    found = speed(real_model)
    assert found.draft["code"] == pytest.approx(10_000 / found.ms_per_draft_round)
    assert found.draft["prose"] == pytest.approx(3_400 / found.ms_per_draft_round)


def test_a_block_has_one_first_pass_its_other_passes_and_a_commit(real_model: ModelBytes) -> None:
    found = speed(real_model)
    passes = 32 / 2.6
    ms = found.ms_per_first_preview + (passes - 1) * found.ms_per_preview + found.ms_per_commit
    assert found.denoise["code"] == pytest.approx(32_000 / ms)


def test_slots_that_do_not_hold_a_pass_cost_copies_in_every_pass(real_model: ModelBytes) -> None:
    tight = made(real_model, device=6 * GIB, context=4096)
    missing = 70 - min(tight.slots_per_layer)
    assert missing > 0
    copies = missing * 40 * 1_622_016 / 52e9
    floor = floor_bytes(real_model, distinct=70, committed=4096) / 896e9
    found = predict(tight, RATES)
    assert found.ms_per_preview == pytest.approx(1000 * (floor + copies) + LAUNCHES)


def test_staged_copies_are_slower_than_pinned_ones_and_the_disk_slower_still(
    real_model: ModelBytes,
) -> None:
    pinned = speed(real_model).ms_per_first_preview
    staged = speed(real_model, pin_limit=2 * GIB).ms_per_first_preview
    disk = speed(real_model, host=4 * GIB).ms_per_first_preview
    assert pinned < staged < disk


def test_a_plan_without_room_has_no_speed(real_model: ModelBytes) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        speed(real_model, device=0)


def test_rates_of_nothing_are_a_wrong_call(real_model: ModelBytes) -> None:
    with pytest.raises(ValueError, match=r"rates are 0\.0"):
        predict(made(real_model), Rates(device=0.0))
