"""The small world of the demo: people, things and places, and sentences about them.

Every list is short so that each word is one token and is seen thousands of times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WOMEN = ("Anna", "Clara", "Emma", "Greta", "Ida", "Kate")
MEN = ("Ben", "David", "Felix", "Hugo", "Jonas", "Leo")
NAMES = (*WOMEN, *MEN)
OBJECTS = (
    *("kite", "ball", "book", "lamp", "drum", "boat"),
    *("hat", "cup", "bike", "bag", "ring", "coat"),
)
COLOURS = ("red", "blue", "green", "black", "white", "pink", "brown", "grey")
CITIES = ("Rome", "Paris", "Berlin", "Madrid", "Oslo", "Vienna", "Prague", "Lisbon")
LIKES = ("tea", "coffee", "music", "chess", "milk", "rice", "snow", "rain")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
VALUES = {"has": OBJECTS, "lives": CITIES, "likes": LIKES}


@dataclass(frozen=True)
class Fact:
    """`name` has, likes or lives in `value`; a thing may have a colour."""

    name: str
    kind: str
    value: str
    colour: str = ""

    @property
    def sentence(self) -> str:
        """The fact as text."""
        if self.kind == "has":
            return f"{self.name} has a {self.thing}."
        return f"{self.name} {self.kind} {'in ' if self.kind == 'lives' else ''}{self.value}."

    @property
    def thing(self) -> str:
        """The value with its colour, if it has one."""
        return f"{self.colour} {self.value}" if self.colour else self.value


def draw_facts(rng: random.Random, count: int, *, coloured: bool) -> list[Fact]:
    """`count` facts that never contradict: each person and kind once, each value once."""
    names = rng.sample(NAMES, count)
    values = {kind: rng.sample(pool, count) for kind, pool in VALUES.items()}
    colours = rng.sample(COLOURS, count)
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    for i in range(count):
        name = names[rng.randrange(i)] if i and rng.random() < 0.25 else names[i]
        kind = rng.choice(("has", "has", "lives", "likes"))
        if (name, kind) in taken:
            name = names[i]
        taken.add((name, kind))
        colour = colours[i] if coloured and kind == "has" else ""
        facts.append(Fact(name, kind, values[kind][i], colour))
    return facts
