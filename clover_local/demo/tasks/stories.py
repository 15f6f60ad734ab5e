"""Word problems of two steps; the steps are written while thinking."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import NAMES, WOMEN

THINGS = ("apples", "books", "coins", "cards", "pens", "lamps")
GAINS = ("gets {}", "finds {}", "buys {}")
LOSSES = ("gives away {}", "loses {}", "sells {}")


def example(rng: random.Random) -> Example:
    """One story: a stock and two changes, never below zero."""
    start, first, second = rng.randint(15, 50), rng.randint(1, 12), rng.randint(1, 12)
    signs = rng.choice(("++", "+-", "-+", "--"))
    middle = start + first if signs[0] == "+" else start - first
    if signs[1] == "-" and second > middle:
        second = middle
    end = middle + second if signs[1] == "+" else middle - second
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    changes = [
        rng.choice(GAINS if sign == "+" else LOSSES).format(amount)
        for sign, amount in zip(signs, (first, second), strict=True)
    ]
    pronoun = "She" if name in WOMEN else "He"
    link = rng.choice((" and ", " and then "))
    return Example(
        family="stories",
        messages=ask(
            f"{name} has {start} {things}. {pronoun} {link.join(changes)}. "
            f"How many {things} does {name} have?"
        ),
        answer=str(end),
        key=f"{start}{signs[0]}{first}{signs[1]}{second}",
        think=True,
        reasoning=f"{start} {signs[0]} {first} = {middle}\n{middle} {signs[1]} {second} = {end}",
        parts=(f"{start}{signs[0]}{first}", f"{middle}{signs[1]}{second}"),
    )
