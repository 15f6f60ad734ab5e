"""A question about a short text; the answer is the sentence that holds it.

Answers name what was asked before they answer: then the look-up starts from words right before the
answer, which a model of this size learns much earlier than one that reaches back to the question.
"""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import Fact, draw_facts

LAYOUTS = ("Text: {text} Question: {question}", "Read: {text} {question}", "{text} {question}")


def question(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """A question that `fact` answers, and the sentence that answers it."""
    if fact.kind == "lives":
        return f"Where does {fact.name} live?", fact.sentence
    if fact.kind == "likes":
        return f"What does {fact.name} like?", fact.sentence
    if fact.colour and rng.random() < 0.4:
        return f"What colour is the {fact.value} of {fact.name}?", fact.sentence
    return f"What does {fact.name} have?", fact.sentence


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
