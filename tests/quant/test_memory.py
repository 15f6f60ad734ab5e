"""The memory plan: arithmetic, limits, sizes as text."""

from pathlib import Path

import pytest

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.memory.sizes import GIB, parse_size
from clover_local.quant.memory import (
    check_import,
    disk_needed,
    peak_resident,
    plan_waves,
    shown,
)
from clover_local.quant.profiles import Choices, Recipe, resolve


def recipe_for(
    config: ModelConfig,
    *,
    profile: str = "balanced",
    method: str = "gptq",
    evaluation_tokens: int = 0,
) -> Recipe:
    choices = Choices(profile=profile, method=method, evaluation_tokens=evaluation_tokens)
    return resolve(choices, config, device="cpu")[0]


@pytest.mark.parametrize("profile", ["balanced", "quality"])
def test_real_model_fits_into_twelve_gib(real_config: ModelConfig, profile: str) -> None:
    recipe = recipe_for(real_config, profile=profile, evaluation_tokens=Choices.evaluation_tokens)
    plan = plan_waves(real_config, recipe, limit=12 * GIB, rows=1056)
    assert plan.peak <= 11 * GIB
    assert (plan.wave, plan.waves) == (256, 1)


def test_plan_says_whether_freed_memory_may_stay(real_config: ModelConfig) -> None:
    recipe = recipe_for(real_config)
    plans = [plan_waves(real_config, recipe, limit=gib * GIB, rows=1056) for gib in (4, 24)]
    assert [plan.is_tight for plan in plans] == [True, False]


@pytest.mark.parametrize("gib", [3, 4])
def test_less_memory_means_more_waves_within_the_limit(real_config: ModelConfig, gib: int) -> None:
    plan = plan_waves(real_config, recipe_for(real_config), limit=gib * GIB, rows=1056)
    assert plan.peak <= gib * GIB
    assert plan.waves * plan.wave >= 256 > plan.wave
    assert plan.wave % plan.batch == 0
    larger = plan_waves(real_config, recipe_for(real_config), limit=2 * gib * GIB, rows=1056)
    assert larger.wave > plan.wave
    assert larger.batch == plan.batch


def test_too_little_memory_is_refused_with_the_least(real_config: ModelConfig) -> None:
    recipe = recipe_for(real_config)
    with pytest.raises(SettingsError, match=r"--memory 1GiB is too little .* at least") as error:
        plan_waves(real_config, recipe, limit=GIB, rows=1056)
    least = parse_size(str(error.value).rpartition(" ")[2], "--memory")
    assert plan_waves(real_config, recipe, limit=least, rows=1056).peak <= least
    with pytest.raises(SettingsError, match="too little"):
        plan_waves(real_config, recipe, limit=least - 2 * (1 << 20), rows=1056)


@pytest.mark.parametrize(("method", "squares"), [("gptq", 2), ("rtn", 1)])
def test_experts_stage_grows_by_the_sums_of_each_expert_of_the_wave(
    real_config: ModelConfig, method: str, squares: int
) -> None:
    recipe = recipe_for(real_config, method=method)
    plans = [plan_waves(real_config, recipe, limit=gib * GIB, rows=1056) for gib in (3, 4)]
    more = plans[1].stages["experts"] - plans[0].stages["experts"]
    assert more == (plans[1].wave - plans[0].wave) * squares * 4 * 2048 * 2048


def test_rounding_needs_less_memory_than_gptq_with_its_source(real_config: ModelConfig) -> None:
    plans = [
        plan_waves(real_config, recipe_for(real_config, method=method), limit=12 * GIB, rows=1056)
        for method in ("rtn", "gptq")
    ]
    assert plans[0].stages["source"] < plans[1].stages["source"]
    assert plans[0].peak < 7 * GIB < plans[1].peak


def test_comparison_needs_memory_for_both_models(real_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="too little"):
        recipe = recipe_for(real_config, evaluation_tokens=Choices.evaluation_tokens)
        plan_waves(real_config, recipe, limit=4 * GIB, rows=1056)


def test_small_models_are_quantized_in_one_batch(golden_config: ModelConfig) -> None:
    plan = plan_waves(golden_config, recipe_for(golden_config), limit=GIB, rows=1056)
    assert plan.batch == plan.wave == golden_config.num_experts
    assert plan.waves == 1


def test_import_holds_one_layer_twice(real_config: ModelConfig) -> None:
    check_import(real_config, 20 * 10**9, limit=4 * GIB)
    with pytest.raises(SettingsError, match="at least"):
        check_import(real_config, 20 * 10**9, limit=GIB)


def test_disk_holds_the_result_and_the_rows(real_config: ModelConfig) -> None:
    recipe = recipe_for(real_config)
    needed = disk_needed(real_config, recipe, rows=0)
    assert 19e9 < needed < 22e9  # the result, as spec'd: 16.6 GB of experts and what surrounds them
    assert disk_needed(real_config, recipe, rows=1000) - needed == 7 * 1000 * 2048 * 4
    plain = recipe_for(real_config, method="rtn")
    of_rows = disk_needed(real_config, plain, rows=1000) - disk_needed(real_config, plain, rows=0)
    assert of_rows == 3 * 1000 * 2048 * 4


@pytest.mark.parametrize("nbytes", [12 * GIB, 800 << 20, 1535 << 20])
def test_shown_size_is_read_back(nbytes: int) -> None:
    assert parse_size(shown(nbytes), "--memory") == nbytes


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_is_that_of_this_process() -> None:
    peak = peak_resident()
    assert peak is not None
    assert peak > 50 << 20
