"""What is done to each kind of tensor: profiles, methods, group sizes, limits; needs no torch.

A `Recipe` holds every choice that changes a byte of the result, resolved against the model's sizes;
what only changes the way there (memory, progress) is not in it. So two runs with equal recipes and
equal sources make equal files, and a run may be continued exactly when both are equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError

METHODS = ("gptq", "rtn", "nf4")
TRUNK_BITS = (8, 16)
TRUNK_GROUP_SIZES = (64, 32)  # the first that divides a matrix's inputs
GROUP_SIZES = (128, 64, 32)  # of experts, when none is given: the largest that divides
GROUP_STEP = 16
"""A group is whole words at 4 bits and whole vectors of a kernel."""
NF4_BLOCK = 64
AS_SOURCE = 16
"""Bits of a matrix that stays as it is in the source."""


@dataclass(frozen=True)
class Profile:
    """A ready choice of formats.

    `down_error_limit`: where the median relative output error of a layer's INT4 down projections
    is above it, they become INT8; None: they never do.
    """

    group_size: int
    head_bits: int
    down_error_limit: float | None = None


PROFILES = {
    "balanced": Profile(group_size=128, head_bits=8),
    "quality": Profile(group_size=32, head_bits=AS_SOURCE, down_error_limit=0.01),
}
_LATER = {"resident": "the profile resident comes with 3-bit kernels"}


@dataclass(frozen=True)
class Recipe:
    """Every choice that decides the bytes of the result."""

    profile: str
    method: str
    group_size: int
    trunk_bits: int
    head_bits: int
    down_error_limit: float | None
    calibration_tokens: int
    preview_weight: float
    min_tokens: int
    damp: float
    seed: int
    evaluation_tokens: int
    device: str

    @property
    def needs_source_rows(self) -> bool:
        """Whether weights are fitted to what the source makes of rows of its own."""
        return self.method == "gptq"


@dataclass(frozen=True)
class Choices:
    """What the user may choose, with the defaults; `resolve` makes a `Recipe` of it."""

    profile: str = "balanced"
    method: str = "gptq"
    group_size: int | None = None
    trunk_bits: int = 8
    calibration_tokens: int = 65536
    preview_weight: float = 1.0
    min_tokens: int = 64
    damp: float = 0.01
    seed: int = 0
    evaluation_tokens: int = 32768


def resolve(choices: Choices, config: ModelConfig, *, device: str) -> tuple[Recipe, list[str]]:
    """The recipe for a model of these sizes, and notes on what had to be chosen differently.

    Raises:
        SettingsError: an unknown name, a number out of range, a group size that does not divide.
    """
    profile = _profile(choices)
    group_size = choices.group_size
    notes = []
    if group_size is None:
        group_size = _largest_group_size(config, at_most=profile.group_size)
        if group_size != profile.group_size:
            notes.append(
                f"group size {group_size}, because the profile's {profile.group_size} does not "
                f"divide {_sizes(config)}"
            )
    elif group_size % GROUP_STEP or not _divides(group_size, config):
        raise SettingsError(
            f"--group-size {group_size} does not divide {_sizes(config)} in multiples of "
            f"{GROUP_STEP}: {_remedy(config)}"
        )
    if choices.method == "nf4":
        if not _divides(NF4_BLOCK, config):
            raise SettingsError(
                f"nf4 needs {_sizes(config)} to be multiples of {NF4_BLOCK}: use gptq"
            )
        notes.append("nf4 stays in the source's dtype: a baseline for comparisons, not smaller")
    recipe = Recipe(
        profile=choices.profile,
        method=choices.method,
        group_size=group_size,
        trunk_bits=choices.trunk_bits,
        head_bits=profile.head_bits,
        down_error_limit=profile.down_error_limit,
        calibration_tokens=choices.calibration_tokens,
        preview_weight=choices.preview_weight,
        min_tokens=choices.min_tokens,
        damp=choices.damp,
        seed=choices.seed,
        evaluation_tokens=choices.evaluation_tokens,
        device=device,
    )
    return recipe, notes


def without_effect(
    given: Sequence[str], recipe: Recipe, *, has_diffusion: bool
) -> list[tuple[str, str]]:
    """The choices among `given` that change nothing with this recipe, each with the reason."""
    method = f"with --method {recipe.method}"
    rules = (
        (recipe.method == "rtn", "damp", method),
        (recipe.method == "nf4", "damp group_size", method),
        (not has_diffusion, "preview_weight", "on a model without diffusion parameters"),
    )
    return [
        (name, why)
        for holds, names, why in rules
        if holds
        for name in names.split()
        if name in given
    ]


def trunk_group_size(columns: int) -> int | None:
    """The group size of an INT8 matrix with so many inputs; None: none divides, so it stays."""
    return next((size for size in TRUNK_GROUP_SIZES if columns % size == 0), None)


def _profile(choices: Choices) -> Profile:
    """The chosen profile; checks all that does not depend on the model."""
    profile = PROFILES.get(choices.profile)
    if profile is None:
        later = _LATER.get(choices.profile, f"--profile {choices.profile} is unknown")
        raise SettingsError(f"{later}: use {' or '.join(PROFILES)}")
    if choices.method not in METHODS:
        raise SettingsError(
            f"--method {choices.method} is unknown: use {', '.join(METHODS[:-1])} or {METHODS[-1]}"
        )
    if choices.trunk_bits not in TRUNK_BITS:
        raise SettingsError(f"--trunk-bits {choices.trunk_bits}: use 8, or 16 for as in the source")
    _check_ranges(choices)
    return profile


def _check_ranges(choices: Choices) -> None:
    ranges = (
        ("calibration-tokens", choices.calibration_tokens, 1, 2**31),
        ("evaluation-tokens", choices.evaluation_tokens, 0, 2**31),
        ("preview-weight", choices.preview_weight, 0, 1e6),
        ("min-tokens", choices.min_tokens, 0, 2**31),
        ("damp", choices.damp, 1e-9, 1e3),
        ("seed", choices.seed, 0, 2**63 - 1),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # true for NaN too
            raise SettingsError(f"--{name} {value:g} is out of range: use {low:g} to {high:g}")


def _divides(group_size: int, config: ModelConfig) -> bool:
    sizes = (config.hidden_size, config.moe_intermediate_size)
    return group_size > 0 and all(size % group_size == 0 for size in sizes)


def _largest_group_size(config: ModelConfig, *, at_most: int) -> int:
    for size in GROUP_SIZES:
        if size <= at_most and _divides(size, config):
            return size
    raise SettingsError(
        f"no usual group size up to {at_most} divides {_sizes(config)}: {_remedy(config)}"
    )


def _sizes(config: ModelConfig) -> str:
    return (
        f"hidden_size {config.hidden_size} and moe_intermediate_size {config.moe_intermediate_size}"
    )


def _remedy(config: ModelConfig) -> str:
    common = math.gcd(config.hidden_size, config.moe_intermediate_size)
    fitting = [size for size in range(GROUP_STEP, common + 1, GROUP_STEP) if common % size == 0]
    if not fitting:
        return "this model's experts cannot be quantized in groups"
    return f"pass --group-size {' or '.join(map(str, fitting))}"
