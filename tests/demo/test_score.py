"""Held-out questions are asked one by one and graded exactly."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from clover_local.demo.score import held_out, score
from clover_local.demo.tasks.example import Example, is_held_out
from clover_local.demo.tasks.stream import DRILLS, FAMILIES


class Letters:
    """A tokenizer of one id a character."""

    def render(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return messages[-1]["content"]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Parrot:
    """A generator that answers every question with its own text, in two passes and a commit."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(reset=lambda: self.resets.append(True))
        self.resets: list[bool] = []
        self.result: Any = None

    def run(self, prompt_ids: Sequence[int]) -> Iterator[None]:
        self.result = SimpleNamespace(
            text_ids=tuple(prompt_ids),
            token_ids=(*prompt_ids, 0),
            stats=SimpleNamespace(previews=2, forwards=3),
        )
        yield None


def question(text: str, answer: str, family: str) -> Example:
    return Example(family, ({"role": "user", "content": text},), answer=answer, key=text)


def test_accuracy_and_tokens_per_pass_are_counted_over_all_answers() -> None:
    parrot = Parrot()
    examples = [question("ab", "ab", "x"), question("abcd", "no", "x"), question("c", "c", "y")]
    result = score(parrot, Letters(), examples)  # type: ignore[arg-type]
    assert len(parrot.resets) == 3
    assert result.accuracy("x") == 0.5
    assert result.accuracy() == pytest.approx(2 / 3)
    assert result.tokens_per_preview == pytest.approx((3 + 5 + 2) / 6)
    assert result.tokens_per_forward == pytest.approx((3 + 5 + 2) / 9)


def test_every_family_is_asked_and_only_held_out_questions() -> None:
    examples = held_out(3, per_family=4)
    assert [example.family for example in examples] == [name for name in FAMILIES for _ in range(4)]
    assert all(is_held_out(example.key) for example in examples)
    assert not {example.family for example in examples} & set(DRILLS)


def test_another_seed_asks_other_questions() -> None:
    first, second = ({e.key for e in held_out(seed, per_family=4)} for seed in (1, 2))
    assert len(first - second) > len(first) / 2
