"""One question with its right answer, and the split that decides which ones are never trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

HELD_OUT_BELOW = 16  # of 256 values of the first hash byte: 1 question in 16


@dataclass(frozen=True)
class Example:
    """A conversation that ends with a question, and what the model has to say to it.

    `key` is the content of the question without its phrasing; `parts` are the keys of other
    questions whose answers the reasoning gives away (a story contains two sums).
    """

    family: str
    messages: tuple[dict[str, str], ...]
    answer: str
    key: str
    tools: tuple[dict[str, Any], ...] = ()
    think: bool = False
    reasoning: str = ""
    parts: tuple[str, ...] = ()


def ask(text: str) -> tuple[dict[str, str], ...]:
    """A conversation of one user turn."""
    return ({"role": "user", "content": text},)


def is_held_out(key: str) -> bool:
    """Whether the question `key` is kept for evaluation, whatever its phrasing."""
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_BELOW


def may_train(example: Example) -> bool:
    """Whether neither the question nor a question inside its reasoning is held out."""
    return not is_held_out(example.key) and not any(map(is_held_out, example.parts))


def grade(example: Example, text: str) -> bool:
    """Whether `text`, a response with or without its thinking, gives exactly the answer."""
    final = text.rsplit("</think>", 1)[-1].removesuffix("<|im_end|>")
    return final.strip() == example.answer.strip()
