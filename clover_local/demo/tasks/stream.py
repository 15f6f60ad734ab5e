"""An endless, reproducible stream of examples from one side of the split."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from clover_local.demo.tasks import (
    calendar,
    code,
    decisions,
    drills,
    extract,
    ordering,
    reading,
    stories,
    sums,
    talk,
    tools,
)
from clover_local.demo.tasks.example import Example, is_held_out, may_train

FAMILIES: dict[str, Callable[[random.Random], Example]] = {
    "sums": sums.example,
    "compare": ordering.compare,
    "sorting": ordering.sort,
    "calendar": calendar.example,
    "reading": reading.example,
    "extract": extract.example,
    "tools": tools.example,
    "code": code.example,
    "decisions": decisions.example,
    "talk": talk.example,
    "stories": stories.example,
}
# Only for training: dense look-ups, from which the families above learn to find things in a text.
DRILLS: dict[str, Callable[[random.Random], Example]] = {
    "echo": drills.echo,
    "recite": drills.recite,
    "survey": drills.survey,
    "table": drills.table,
}
SOURCES = {**FAMILIES, **DRILLS}
OPENING_FAMILIES = ("sums", "compare", "calendar", "talk")  # short enough for a first turn
LONG_FAMILIES = ("decisions", "tools", *DRILLS)  # stay alone
SYSTEM = ("You are a helpful assistant.", "You are Clover.", "Answer the question.")
TWO_TURN_SHARE, SYSTEM_SHARE, THINK_SHARE = 0.1, 0.04, 0.05
NO_STEPS = "No steps are needed."


def stream(
    seed: int, *, held_out: bool, weights: Mapping[str, float] | None = None
) -> Iterator[Example]:
    """Yields examples for ever: only held-out questions, or never one.

    `weights` gives the share of each family (default: all alike; a missing family has none).

    Raises:
        ValueError: `weights` names an unknown family, or no family has a positive weight.
    """
    chosen = dict.fromkeys(FAMILIES, 1.0) if weights is None else dict(weights)
    unknown = sorted(set(chosen) - set(SOURCES))
    if unknown or min(chosen.values(), default=0) < 0 or sum(chosen.values()) <= 0:
        raise ValueError(f"weights {chosen}: want positive shares of {sorted(SOURCES)}")
    return _draw(random.Random(seed), list(chosen), list(chosen.values()), held_out)


def _draw(
    rng: random.Random, names: list[str], shares: list[float], held_out: bool
) -> Iterator[Example]:
    while True:
        (family,) = rng.choices(names, shares)
        yield _dress(rng, _one(rng, family, held_out))


def _one(rng: random.Random, family: str, held_out: bool) -> Example:
    """A question of the family from the wanted side of the split."""
    while True:
        example = SOURCES[family](rng)
        if is_held_out(example.key) if held_out else may_train(example):
            return example


def _dress(rng: random.Random, example: Example) -> Example:
    """Now and then a turn before, a system message, or thinking where none is needed."""
    messages = example.messages
    if example.family not in LONG_FAMILIES and rng.random() < TWO_TURN_SHARE:
        first = _one(rng, rng.choice(OPENING_FAMILIES), held_out=False)
        messages = (*first.messages, {"role": "assistant", "content": first.answer}, *messages)
    if rng.random() < SYSTEM_SHARE:
        messages = ({"role": "system", "content": rng.choice(SYSTEM)}, *messages)
    if not example.think and example.family != "sums" and rng.random() < THINK_SHARE:
        return replace(example, messages=messages, think=True, reasoning=NO_STEPS)
    return replace(example, messages=messages) if messages is not example.messages else example
