"""A question about a short text; the answer is copied from it.

Answers are whole sentences that name what was asked first: then the look-up starts from words right
before the answer, which a model of this size learns much earlier than one that reaches back to the
question.
"""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import Fact, draw_facts

LAYOUTS = ("Text: {text} Question: {question}", "Read: {text} {question}", "{text} {question}")


def question(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """A question that `fact` answers, and the sentence that answers it."""
    name, value = fact.name, fact.value
    if fact.kind == "lives":
        return rng.choice(
            (
                (f"Who lives in {value}?", f"The one who lives in {value} is {name}."),
                (f"Where does {name} live?", fact.sentence),
            )
        )
    if fact.kind == "likes":
        return rng.choice(
            (
                (f"Who likes {value}?", f"The one who likes {value} is {name}."),
                (f"What does {name} like?", fact.sentence),
            )
        )
    return rng.choice(
        (
            (f"Who has the {value}?", f"The one who has the {value} is {name}."),
            (f"What does {name} have?", fact.sentence),
            (f"What colour is the {value}?", f"The {value} is {fact.colour}."),
        )
    )


def example(rng: random.Random) -> Example:
    """Two to four facts and one question."""
    facts = draw_facts(rng, rng.randint(2, 4), coloured=True)
    asked, answer = question(rng, rng.choice(facts))
    text = " ".join(fact.sentence for fact in facts)
    return Example(
        family="reading",
        messages=ask(rng.choice(LAYOUTS).format(text=text, question=asked)),
        answer=answer,
        key=f"{text} {asked}",
    )
