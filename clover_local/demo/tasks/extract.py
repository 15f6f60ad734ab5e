"""A sentence about a person, turned into JSON with the keys that are asked for."""

from __future__ import annotations

import json
import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import CITIES, NAMES, OBJECTS

FIELDS = (
    ("name", "age", "city"),
    ("name", "age", "city"),
    ("name", "age", "city", "item"),
    ("name", "age"),
    ("name", "city"),
    ("name", "item"),
)
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
)
WITH_ITEM = (
    "{name} is {age} years old, lives in {city} and has a {item}.",
    "{name}, {age}, lives in {city} and has a {item}.",
    "{name} from {city} is {age} years old and has a {item}.",
)


def example(rng: random.Random) -> Example:
    """One person, and two to four keys."""
    fields = rng.choice(FIELDS)
    person: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(CITIES),
        "item": rng.choice(OBJECTS),
    }
    with_item = "item" in fields or rng.random() < 0.3
    sentence = rng.choice(WITH_ITEM if with_item else SENTENCES).format(**person)
    keys = ", ".join(fields[:-1]) + f" and {fields[-1]}"
    layout = rng.choice(("Extract {} as JSON: {}", "Give {} as JSON: {}"))
    return Example(
        family="extract",
        messages=ask(layout.format(keys, sentence)),
        answer=json.dumps({field: person[field] for field in fields}),
        key=f"{fields}:{list(person.values())[: 4 if with_item else 3]}",
    )
