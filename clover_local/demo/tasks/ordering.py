"""Numbers of one digit compared and put in order."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask

TWO = ("Which is {}, {}?", "Which number is {}: {}?")
THREE = ("Which is the {}: {}?", "Which number is the {}: {}?")
UP = ("Sort: {}", "Sort in ascending order: {}", "Sort from small to large: {}")
DOWN = ("Sort in descending order: {}", "Sort from large to small: {}")


def compare(rng: random.Random) -> Example:
    """The largest or smallest of two to four numbers of one digit."""
    count = rng.choice((2, 3, 3, 4, 4))
    numbers = rng.sample(range(10), count)
    large = rng.random() < 0.5
    listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
    if count == 2:
        text = rng.choice(TWO).format("larger" if large else "smaller", listed)
    else:
        text = rng.choice(THREE).format("largest" if large else "smallest", listed)
    return Example(
        family="compare",
        messages=ask(text),
        answer=f"{listed}: {max(numbers) if large else min(numbers)}",
        key=f"{'larger' if large else 'smaller'}:{numbers}",
    )


def sort(rng: random.Random) -> Example:
    """Three to five numbers of one digit, put in order."""
    count = rng.choice((3, 4, 4, 5))
    numbers = rng.sample(range(10), count)
    down = rng.random() < 0.4
    listed = ", ".join(map(str, numbers))
    return Example(
        family="sorting",
        messages=ask(rng.choice(DOWN if down else UP).format(listed)),
        answer=", ".join(map(str, sorted(numbers, reverse=down))),
        key=f"{'down' if down else 'up'}:{listed}",
    )
