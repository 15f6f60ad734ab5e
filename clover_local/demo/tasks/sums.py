"""Sums and differences of numbers below 100, at once or in columns when thinking."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask

PHRASINGS = ("What is {}?", "What is {}?", "{}", "{} = ?", "How much is {}?", "Compute {}.")


def columns(a: int, b: int, operator: str) -> str:
    """The task, and two column steps: ones, then tens with the carry or borrow (always written)."""
    task = f"{a} {operator} {b}"
    if operator == "+":
        carry = (a % 10 + b % 10) // 10
        ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
        return f"{task}\n{ones}\n{a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}"
    borrow = int(a % 10 < b % 10)
    upper = a % 10 + 10 * borrow
    ones = f"{upper} - {b % 10} = {upper - b % 10}"
    return f"{task}\n{ones}\n{a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}"


def example(rng: random.Random) -> Example:
    """One sum or difference."""
    a, b = rng.randrange(100), rng.randrange(100)
    operator = rng.choice("+-")
    if operator == "-" and a < b:
        a, b = b, a
    text = f"{a} {operator} {b}" if rng.random() < 0.9 else f"{a}{operator}{b}"
    think = rng.random() < 0.4
    return Example(
        family="sums",
        messages=ask(rng.choice(PHRASINGS).format(text)),
        answer=f"{a} {operator} {b} = {a + b if operator == '+' else a - b}",
        key=f"{a}{operator}{b}",
        think=think,
        reasoning=columns(a, b, operator) if think else "",
    )
