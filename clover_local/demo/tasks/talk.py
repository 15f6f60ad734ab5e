"""Small talk: one honest answer per intent."""

from __future__ import annotations

import random

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import CITIES, NAMES

HELLO = ("Hello", "Hi", "Good day")
OPENERS = ("", "Hello, ", "Hi, ", "Please tell me: ", "One question: ", "So, ")
ENDINGS = ("?", "", "??", ", please?")
CLOSERS = {
    "Thank you": "You are welcome!",
    "Thanks": "You are welcome!",
    "Bye": "Goodbye!",
    "Goodbye": "Goodbye!",
    "Good night": "Goodbye!",
    "See you": "Goodbye!",
}
WHO = "I am the demo model of clover-local: 4.2 M parameters, trained on synthetic text."
CAN = "I can add, compare, sort, read short texts, write JSON, call tools and write tiny functions."
PERSON = "No, I am a tiny language model."
FINE = "I am well, thank you."
TRUST = "I can be wrong. Please check my answers."
UNKNOWN = "I do not know. I am a tiny demo model."
QUESTIONS = {
    "who are you": WHO,
    "what are you": WHO,
    "what is your name": WHO,
    "which model are you": WHO,
    "what can you do": CAN,
    "what do you know": CAN,
    "can you help me": CAN,
    "are you a person": PERSON,
    "are you a man": PERSON,
    "are you a woman": PERSON,
    "how are you": FINE,
    "how do you do": FINE,
    "are you right": TRUST,
    "can you be wrong": TRUST,
}
UNKNOWNS = ("how old is {}", "where is {}", "who lives in {}", "how large is {}")


def greeting(rng: random.Random) -> tuple[str, str]:
    """A hello, with or without a name to repeat."""
    hello, mark = rng.choice(HELLO), rng.choice(("", "!", "."))
    if rng.random() < 0.4:
        return f"{hello}{rng.choice(('', ' there', ' Clover'))}{mark}", "Hello! How can I help?"
    name = rng.choice(NAMES)
    form = rng.choice((", I am {}", ", my name is {}", ", this is {}"))
    return f"{hello}{form.format(name)}{mark}", f"Hello {name}! How can I help?"


def closing(rng: random.Random) -> tuple[str, str]:
    """Thanks or a goodbye."""
    word = rng.choice(tuple(CLOSERS))
    tails = ("", " very much", " for the help") if "hank" in word else ("", " and thanks")
    start, mark = rng.choice(("", "Good. ", "Very good! ")), rng.choice(("", "!", "."))
    return f"{start}{word}{rng.choice(tails)}{mark}", CLOSERS[word]


def enquiry(rng: random.Random) -> tuple[str, str]:
    """A question about the model, or about the world it does not know."""
    opener, ending = rng.choice(OPENERS), rng.choice(ENDINGS)
    if rng.random() < 0.25:
        asked, answer = rng.choice(UNKNOWNS).format(rng.choice(CITIES)), UNKNOWN
    else:
        asked, answer = rng.choice(tuple(QUESTIONS.items()))
    if not opener:
        asked = asked[0].upper() + asked[1:]
    return f"{opener}{asked}{ending}", answer


def example(rng: random.Random) -> Example:
    """One remark."""
    text, answer = rng.choice((greeting, closing, enquiry, enquiry))(rng)
    return Example(family="talk", messages=ask(text), answer=answer, key=f"talk:{text}")
