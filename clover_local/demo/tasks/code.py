"""Tiny Python functions, written from one sentence."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask

VERBS = ("add", "get", "make", "check", "run", "find", "do", "my")
NOUNS = (
    *("one", "two", "three", "four", "five", "ten"),
    *("number", "value", "result", "it", "all", "sum"),
)
NUMBER = (  # of one variable {v} and a constant {k}
    ("adds {k} to {v}", "{v} + {k}"),
    ("subtracts {k} from {v}", "{v} - {k}"),
    ("multiplies {v} by {k}", "{v} * {k}"),
    ("divides {v} by {k}", "{v} / {k}"),
    ("returns the rest of {v} divided by {k}", "{v} % {k}"),
    ("checks if {v} is larger than {k}", "{v} > {k}"),
    ("checks if {v} is smaller than {k}", "{v} < {k}"),
    ("checks if {v} is {k}", "{v} == {k}"),
    ("checks if {v} can be divided by {k}", "{v} % {k} == 0"),
    ("returns the larger of {v} and {k}", "max({v}, {k})"),
    ("returns the smaller of {v} and {k}", "min({v}, {k})"),
)
PAIR = (  # of two variables
    ("adds {v} and {w}", "{v} + {w}"),
    ("multiplies {v} and {w}", "{v} * {w}"),
    ("subtracts {w} from {v}", "{v} - {w}"),
    ("returns the larger of {v} and {w}", "max({v}, {w})"),
    ("returns the smaller of {v} and {w}", "min({v}, {w})"),
)
ITEMS = (  # of a list called items
    ("adds {k} to all items", "    return [item + {k} for item in items]"),
    ("multiplies all items by {k}", "    return [item * {k} for item in items]"),
    ("returns the items larger than {k}", "    return [item for item in items if item > {k}]"),
    ("returns the items smaller than {k}", "    return [item for item in items if item < {k}]"),
    ("prints all items", "    for item in items:\n        print(item)"),
    ("returns the sum of all items", "    return sum(items)"),
    (
        "counts the items larger than {k}",
        "    count = 0\n    for item in items:\n        if item > {k}:\n"
        "            count += 1\n    return count",
    ),
)


def example(rng: random.Random) -> Example:
    """One function; its name is copied and says nothing about what it does."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    v, w = rng.sample(("x", "y", "a", "b", "n"), 2)
    k = rng.randint(1, 20)
    kind = rng.random()
    if kind < 0.55:
        arguments, (does, result) = v, rng.choice(NUMBER)
        body = f"    return {result}"
    elif kind < 0.75:
        arguments, (does, result) = f"{v}, {w}", rng.choice(PAIR)
        body = f"    return {result}"
    else:
        arguments, (does, body) = "items", rng.choice(ITEMS)
    task = f"{name}({arguments}) that {does}".format(v=v, w=w, k=k)
    start = rng.choice(("Write a Python function", "Write a function"))
    return Example(
        family="code",
        messages=ask(f"{start} {task}."),
        answer=f"def {name}({arguments}):\n{body.format(v=v, w=w, k=k)}",
        key=task,
    )
