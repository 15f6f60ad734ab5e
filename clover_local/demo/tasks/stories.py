"""Word problems of two steps; the steps are written while thinking."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import NAMES, WOMEN
from clover_local.demo.tasks.sums import apply, borrows, parts, worked

THINGS = ("apples", "books", "coins", "cards", "pens", "lamps")
GAINS = ("gets {}", "finds {}", "buys {}")
LOSSES = ("gives away {}", "loses {}", "sells {}")


def example(rng: random.Random) -> Example:
    """One story: a stock and two changes, never below zero."""
    signs = rng.choice(("++", "+-", "-+", "--"))
    while True:
        start, first, second = rng.randint(10, 29), rng.randint(1, 9), rng.randint(1, 9)
        middle = apply(start, signs[0], first)
        end = apply(middle, signs[1], second)
        changes_of = ((start, signs[0], first), (middle, signs[1], second))
        if not any(sign == "-" and borrows(a, b) for a, sign, b in changes_of):
            break
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
        reasoning=f"{worked(start, signs[0], first)}\n{worked(middle, signs[1], second)}",
        parts=(
            f"{start}{signs[0]}{first}",
            f"{middle}{signs[1]}{second}",
            *parts(start, signs[0], first),
            *parts(middle, signs[1], second),
        ),
    )
