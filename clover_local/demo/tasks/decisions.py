"""Several yes/no questions about one text, answered together: a block at a time pays off here.

Each line of the answer repeats what the text says before it judges (see `reading`).
"""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import Fact, draw_facts

LAYOUTS = ("Text: {}\nAnswer yes or no.\n{}", "Read: {}\nYes or no?\n{}")


def claim(fact: Fact) -> str:
    """What is asked about a fact, without its subject: `have a kite`."""
    if fact.kind == "lives":
        return f"live in {fact.value}"
    return f"like {fact.value}" if fact.kind == "likes" else f"have a {fact.value}"


def said(fact: Fact, *, holds: bool) -> str:
    """The sentence of the text, without its end: the fact, or that it does not hold."""
    return fact.sentence.rstrip(".") if holds else f"{fact.name} does not {claim(fact)}"


def example(rng: random.Random) -> Example:
    """Two to eight facts, each about another person, half of them denied; two or more asked."""
    facts: list[Fact] = []
    while len(facts) < 2:
        drawn = draw_facts(rng, rng.randint(3, 8), coloured=False)
        facts = list({fact.name: fact for fact in drawn}.values())
    holds = {fact.name: rng.random() < 0.5 for fact in facts}
    text = " ".join(f"{said(fact, holds=holds[fact.name])}." for fact in facts)
    chosen = rng.sample(facts, rng.randint(2, len(facts)))
    asked = "\n".join(f"{i}. Does {fact.name} {claim(fact)}?" for i, fact in enumerate(chosen, 1))
    answer = "\n".join(
        f"{i}. {said(fact, holds=holds[fact.name])}: {'yes' if holds[fact.name] else 'no'}"
        for i, fact in enumerate(chosen, 1)
    )
    return Example(
        family="decisions",
        messages=ask(rng.choice(LAYOUTS).format(text, asked)),
        answer=answer,
        key=f"{text}\n{asked}",
    )
