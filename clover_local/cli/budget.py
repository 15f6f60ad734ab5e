"""A budget for thinking: `--think-budget N` and `/think N`, as settings that there are anyway.

Needs no torch: flags are read before weights are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import typer

from clover_local.cli.preferences import PREFIX
from clover_local.decoding.settings import CERTAIN_BIAS, Place, Settings
from clover_local.errors import SettingsError


def budget(tokens: int) -> dict[str, object]:
    """The settings that end a thinking after `tokens` tokens of the answer.

    The end is as good as certain from there on; of the rows of a block that would all become it
    the surest does (`Settings.ends_thinking_once`).
    """
    return {
        "think_end_bias": CERTAIN_BIAS,
        "think_end_start": tokens,
        "think_end_window": 1,
    }


def with_budget(
    given: Mapping[str, object], origins: Mapping[str, str], tokens: int
) -> tuple[dict[str, object], dict[str, str]]:
    """What is given and where it is from, with the settings of a thinking budget.

    A flag for one of these counts more; a general default does not.
    """
    own = {
        key: value
        for key, value in budget(tokens).items()
        if key not in given or origins.get(key, Place.FLAG) != Place.FLAG
    }
    place = origins.get("think_budget", Place.FLAG)
    places = {**{key: origins.get(key, Place.FLAG) for key in given}, **dict.fromkeys(own, place)}
    return {**given, **own}, places


def limit(settings: Settings) -> int | None:
    """The tokens of the budget in force, wherever it came from."""
    given = budget(settings.think_end_start)
    holds = all(getattr(settings, key) == value for key, value in given.items())
    return settings.think_end_start if holds else None


def require_end(think_end_token_id: int | None, given: str) -> None:
    """Makes sure that the model has a token that ends its thinking.

    Raises:
        SettingsError: it has none; `given` says what asked for one.
    """
    if think_end_token_id is None:
        raise SettingsError(
            f"{given} needs a token that ends the thinking, and this model names none "
            "(dllm_think_end_token_id in generation_config.json): leave the number out",
            keys={"think_budget"},
        )


@dataclass(frozen=True)
class Thinking:
    """Whether to think (None: as the template has it), and for how many tokens at most."""

    on: bool | None
    budget: int | None
    place: str | None  # what decided on `on`; None: nothing did


def thinks(think: bool | None, budget: int | None, origins: Mapping[str, str]) -> Thinking:
    """What `think` and `think_budget` come to together: a budget is for an answer that thinks.

    Of two that exclude each other the one from the stronger place counts; from one place, a budget
    is for whenever the answer thinks.

    Raises:
        typer.BadParameter: `--no-think` with a budget, both as flags.
    """
    if think is not False and budget is not None:
        return Thinking(True, budget, origins.get("think" if think else "think_budget"))
    if budget is None:
        return Thinking(think, None, origins.get("think"))
    strength, other = (_strength(origins.get(key, "")) for key in ("think", "think_budget"))
    if strength == other == _strength(Place.FLAG):
        raise typer.BadParameter("--no-think and --think-budget exclude each other")
    if other > strength:
        return Thinking(True, budget, origins.get("think_budget"))
    return Thinking(False, None, origins.get("think"))


def _strength(place: str) -> int:
    """Flags are above the environment, that is above a config file."""
    return 2 if place == Place.FLAG else int(place.startswith(PREFIX))
