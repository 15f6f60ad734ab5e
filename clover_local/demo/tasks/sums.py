"""Sums and differences of numbers below 30, by way of the tens; differences borrow nothing."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask

PHRASINGS = ("What is {}?", "What is {}?", "{}", "{} = ?", "How much is {}?", "Compute {}.")


def apply(a: int, operator: str, b: int) -> int:
    """a + b or a - b."""
    return a + b if operator == "+" else a - b


def halves(a: int, operator: str, b: int) -> tuple[tuple[int, int], ...]:
    """The way to `a operator b` as pairs (number, what to apply): tens first, then ones.

    One pair where b has only one of them.
    """
    tens, ones = b - b % 10, b % 10
    if not (tens and ones):
        return ((a, b),)
    return ((a, tens), (apply(a, operator, tens), ones))


def worked(a: int, operator: str, b: int) -> str:
    """The sum with the way to it: `17 + 26 = 37 + 6 = 43`, tens first, where b has tens and ones.

    Each step is a function of two or three digits: a model of this size learns those long before
    it learns sums of two-digit numbers at one glance.
    """
    between = "".join(f"{x} {operator} {y} = " for x, y in halves(a, operator, b)[1:])
    return f"{a} {operator} {b} = {between}{apply(a, operator, b)}"


def parts(a: int, operator: str, b: int) -> tuple[str, ...]:
    """Keys of the sums that the way to this one gives away."""
    way = halves(a, operator, b)
    return tuple(f"{x}{operator}{y}" for x, y in way) if len(way) > 1 else ()


def steps(a: int, operator: str, b: int) -> str:
    """The same way as lines of thinking."""
    return "\n".join(
        f"{x} {operator} {y} = {apply(x, operator, y)}" for x, y in halves(a, operator, b)
    )


def borrows(a: int, b: int) -> bool:
    """Whether a - b has to borrow, or is below zero."""
    return b > a or b % 10 > a % 10


def example(rng: random.Random) -> Example:
    """One sum or difference."""
    operator = rng.choice("+-")
    while True:
        a, b = rng.randrange(30), rng.randrange(30)
        if operator == "+" or not borrows(a, b):
            break
    text = f"{a} {operator} {b}" if rng.random() < 0.9 else f"{a}{operator}{b}"
    think = rng.random() < 0.3
    return Example(
        family="sums",
        messages=ask(rng.choice(PHRASINGS).format(text)),
        answer=f"{a} {operator} {b} = {apply(a, operator, b)}" if think else worked(a, operator, b),
        key=f"{a}{operator}{b}",
        think=think,
        reasoning=steps(a, operator, b) if think else "",
        parts=parts(a, operator, b),
    )
