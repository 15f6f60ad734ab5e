"""Exercises that are only trained, never asked: answers full of copies and look-ups.

A question about a text teaches one look-up in sixty tokens; a model of this size needs tens of
thousands of them before it can copy at all. Here nearly every token of the answer is one.
"""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import CITIES, COLOURS, DAYS, LIKES, NAMES, OBJECTS, draw_facts
from clover_local.demo.tasks.reading import question
from clover_local.demo.tasks.sums import borrows, worked

WORDS = (*NAMES, *OBJECTS, *COLOURS, *CITIES, *LIKES, *DAYS)


def echo(rng: random.Random) -> Example:
    """Words and numbers to be repeated, forward."""
    words = [
        rng.choice(WORDS) if rng.random() < 0.85 else str(rng.randrange(100))
        for _ in range(rng.randint(6, 24))
    ]
    text = f"Repeat: {' '.join(words)}"
    return Example("echo", ask(text), answer=text, key=text)


def recite(rng: random.Random) -> Example:
    """All facts of a text again, in the order in which the question names the people."""
    facts = draw_facts(rng, rng.randint(2, 5), coloured=True)
    named = list({fact.name: fact for fact in facts}.values())
    text = " ".join(fact.sentence for fact in named)
    rng.shuffle(named)
    listed = ", ".join(fact.name for fact in named)
    return Example(
        "recite",
        ask(f"Text: {text} Tell me about {listed}."),
        answer="So " + " ".join(fact.sentence for fact in named),
        key=f"{text} {listed}",
    )


def survey(rng: random.Random) -> Example:
    """Several questions about one text."""
    facts = draw_facts(rng, rng.randint(3, 5), coloured=True)
    pairs = dict(question(rng, rng.choice(facts)) for _ in range(rng.randint(3, 6)))
    text = " ".join(fact.sentence for fact in facts)
    asked = "\n".join(f"{i}. {line}" for i, line in enumerate(pairs, 1))
    return Example(
        "survey",
        ask(f"Text: {text}\n{asked}"),
        answer="\n".join(f"{i}. {reply}" for i, reply in enumerate(pairs.values(), 1)),
        key=f"{text}\n{asked}",
    )


def table(rng: random.Random) -> Example:
    """Several of the steps that sums are made of: a number and whole tens, or a number and ones."""
    items: list[tuple[int, str, int]] = []
    count = rng.randint(3, 7)
    while len(items) < count:
        a, operator = rng.randrange(50), rng.choice("+-")
        b = rng.randrange(10) if rng.random() < 0.7 else 10 * rng.randint(1, 2)
        if operator == "+" or not borrows(a, b):
            items.append((a, operator, b))
    text = ", ".join(f"{a} {operator} {b}" for a, operator, b in items)
    return Example(
        "table",
        ask(f"Compute: {text}"),
        answer=", ".join(worked(a, operator, b) for a, operator, b in items),
        key=text,
        parts=tuple(f"{a}{operator}{b}" for a, operator, b in items),
    )
