"""Days of the week and months, counted forward, step by step."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import DAYS, NAMES

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
EVENTS = ("party", "lunch", "trip", "game")


def example(rng: random.Random) -> Example:
    """One date question, mostly about somebody's event, else about the bare day or month."""
    unit, cycle, most = rng.choice((("day", DAYS, 4), ("day", DAYS, 4), ("month", MONTHS, 3)))
    start, steps = rng.randrange(len(cycle)), rng.randint(1, most)
    span = f"{steps} {unit}{'s' if steps > 1 else ''} after {cycle[start]}"
    owner = "" if rng.random() < 0.15 else f"{rng.choice(NAMES)}'s {rng.choice(EVENTS)}"
    if owner:
        text = f"{owner} is {span}. Which {unit} is that?"
    else:
        text = f"{rng.choice(('Which', 'What'))} {unit} is {span}?"
    passed = [cycle[(start + i) % len(cycle)] for i in range(1, steps + 1)]
    counted = ", ".join(f"{i} {name}" for i, name in enumerate(passed, 1))
    return Example(
        family="calendar",
        messages=ask(text),
        answer=f"{span}: {counted}. It is {passed[-1]}.",
        key=f"{owner}:{span}",
    )
