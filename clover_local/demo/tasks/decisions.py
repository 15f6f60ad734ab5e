"""Several yes/no questions about one text, answered together: a block at a time pays off here.

Each line of the answer repeats the claim before it judges it (see `reading`).
"""

from __future__ import annotations

import random
from dataclasses import replace

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import VALUES, Fact, draw_facts

LAYOUTS = ("Text: {}\nAnswer yes or no.\n{}", "Read: {}\nYes or no?\n{}")


def question(fact: Fact, value: str) -> tuple[str, str]:
    """Whether the fact holds with this value: the question, and the claim that it asks about."""
    claim = replace(fact, value=value).sentence.rstrip(".")
    verb, rest = {
        "lives": ("live", f"in {value}"),
        "likes": ("like", value),
        "has": ("have", f"a {value}"),
    }[fact.kind]
    return f"Does {fact.name} {verb} {rest}?", claim


def example(rng: random.Random) -> Example:
    """Three to five facts, and two to eight questions of which about half are true."""
    facts = draw_facts(rng, rng.randint(3, 5), coloured=False)
    count = rng.randint(2, 8)
    asked: dict[str, str] = {}
    while len(asked) < count:
        fact = rng.choice(facts)
        others = [f.value for f in facts if f.kind == fact.kind and f is not fact]
        value = fact.value
        if len(asked) >= 2 * len(facts) - 2 or rng.random() < 0.5:
            value = rng.choice(others if others and rng.random() < 0.5 else VALUES[fact.kind])
        line, claim = question(fact, value)
        asked[line] = f"{claim}: {'yes' if value == fact.value else 'no'}"
    text = " ".join(fact.sentence for fact in facts)
    listed = "\n".join(f"{i}. {line}" for i, line in enumerate(asked, 1))
    return Example(
        family="decisions",
        messages=ask(rng.choice(LAYOUTS).format(text, listed)),
        answer="\n".join(f"{i}. {reply}" for i, reply in enumerate(asked.values(), 1)),
        key=f"{text}\n{listed}",
    )
