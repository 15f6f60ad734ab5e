"""A budget for thinking: `--think-budget N` and `/think N`, as settings that there are anyway.

Needs no torch: flags are read before weights are loaded.
"""

from collections.abc import Mapping

import typer

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
            "(dllm_think_end_token_id in generation_config.json): leave the number out"
        )


def thinks(think: bool | None, think_budget: int | None) -> bool | None:
    """What `--think` comes to: a budget is for an answer that thinks.

    Raises:
        typer.BadParameter: `--no-think` with a budget.
    """
    if think_budget is None:
        return think
    if think is False:
        raise typer.BadParameter("--no-think and --think-budget exclude each other")
    return True
