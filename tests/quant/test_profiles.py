"""Profiles and choices: what they become for a model's sizes, and what is refused."""

from dataclasses import replace

import pytest

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.quant.profiles import Choices, resolve, trunk_group_size, without_effect


def sized(config: ModelConfig, hidden: int, inner: int) -> ModelConfig:
    return replace(config, hidden_size=hidden, moe_intermediate_size=inner)


@pytest.mark.parametrize(
    ("profile", "hidden", "inner", "group_size"),
    [
        ("balanced", 2048, 512, 128),
        ("balanced", 128, 64, 64),
        ("balanced", 96, 32, 32),
        ("quality", 2048, 512, 32),
    ],
)
def test_group_size_is_the_profiles_or_the_largest_that_divides(
    golden_config: ModelConfig, profile: str, hidden: int, inner: int, group_size: int
) -> None:
    config = sized(golden_config, hidden, inner)
    recipe, notes = resolve(Choices(profile=profile), config, device="cpu")
    assert recipe.group_size == group_size
    assert bool(notes) == (group_size != {"balanced": 128, "quality": 32}[profile])
    assert all(str(inner) in note and str(group_size) in note for note in notes)


def test_profiles_differ_in_head_and_down_projections(golden_config: ModelConfig) -> None:
    balanced, _ = resolve(Choices(), golden_config, device="cpu")
    quality, _ = resolve(Choices(profile="quality"), golden_config, device="cpu")
    assert (balanced.head_bits, quality.head_bits) == (8, 16)
    assert balanced.down_error_limit is None
    assert quality.down_error_limit is not None


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(profile="resident"), "resident comes with 3-bit kernels: use balanced or quality"),
        (Choices(profile="best"), "--profile best is unknown: use balanced or quality"),
        (Choices(method="awq"), "--method awq is unknown: use gptq, rtn or nf4"),
        (Choices(trunk_bits=4), "--trunk-bits 4: use 8, or 16"),
        (Choices(calibration_tokens=0), "--calibration-tokens 0 is out of range"),
        (Choices(evaluation_tokens=-1), "--evaluation-tokens -1 is out of range"),
        (Choices(preview_weight=float("nan")), "--preview-weight nan is out of range"),
        (Choices(damp=0.0), "--damp 0 is out of range"),
        (Choices(min_tokens=-1), "--min-tokens -1 is out of range"),
        (Choices(seed=-1), "--seed -1 is out of range"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_what_cannot_be_is_refused(
    golden_config: ModelConfig, choices: Choices, message: str
) -> None:
    with pytest.raises(SettingsError) as error:
        resolve(choices, golden_config, device="cpu")
    assert message in str(error.value)


@pytest.mark.parametrize("group_size", [128, 48, 0, -16, 8], ids=lambda size: f"g{size}")
def test_given_group_size_that_does_not_divide_names_those_that_do(
    golden_config: ModelConfig, group_size: int
) -> None:
    config = sized(golden_config, 128, 64)
    with pytest.raises(SettingsError) as error:
        resolve(Choices(group_size=group_size), config, device="cpu")
    assert f"--group-size {group_size} does not divide hidden_size 128 and moe" in str(error.value)
    assert str(error.value).endswith("pass --group-size 16 or 32 or 64")


def test_sizes_that_no_group_divides_are_refused(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match="no usual group size up to 128 divides hidden_size 40"):
        resolve(Choices(), sized(golden_config, 40, 28), device="cpu")


def test_nf4_needs_blocks_of_64(golden_config: ModelConfig) -> None:
    with pytest.raises(SettingsError, match=r"nf4 needs .* multiples of 64"):
        resolve(Choices(method="nf4"), sized(golden_config, 128, 96), device="cpu")


@pytest.mark.parametrize(
    ("columns", "group_size"), [(2048, 64), (96, 32), (40, None)], ids=["64", "32", "none"]
)
def test_trunk_group_size(columns: int, group_size: int | None) -> None:
    assert trunk_group_size(columns) == group_size


def test_flags_that_change_nothing_are_named_with_the_reason(golden_config: ModelConfig) -> None:
    recipe, _ = resolve(Choices(method="rtn"), golden_config, device="cpu")
    given = ["damp", "seed", "preview_weight"]
    assert without_effect(given, recipe, has_diffusion=True) == [("damp", "with --method rtn")]
    names = [name for name, _ in without_effect(given, recipe, has_diffusion=False)]
    assert names == ["damp", "preview_weight"]
