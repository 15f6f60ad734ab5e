"""How many held-out questions of the demo's tasks a checkpoint answers exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from clover_local.demo.tasks.example import Example, grade
from clover_local.demo.tasks.stream import FAMILIES, stream
from clover_local.generate import Generator
from clover_local.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answered:
    """One question and what became of it."""

    example: Example
    text: str
    right: bool
    tokens: int
    previews: int
    forwards: int  # previews and commits of the answer


@dataclass(frozen=True)
class Score:
    """The answers to one set of questions in one mode."""

    answers: tuple[Answered, ...]

    def accuracy(self, family: str | None = None) -> float:
        """Share of exactly right answers, of one family or of all."""
        chosen = [a for a in self.answers if family in (None, a.example.family)]
        return sum(a.right for a in chosen) / len(chosen)

    @property
    def tokens_per_preview(self) -> float | None:
        """Answer tokens by previews; None in modes without previews."""
        previews = sum(a.previews for a in self.answers)
        return sum(a.tokens for a in self.answers) / previews if previews else None

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens by previews and commits."""
        return sum(a.tokens for a in self.answers) / sum(a.forwards for a in self.answers)


def held_out(seed: int, *, per_family: int) -> list[Example]:
    """The first `per_family` held-out questions of every family in the stream of `seed`."""
    return [
        example
        for family in FAMILIES
        for example in islice(stream(seed, held_out=True, weights={family: 1.0}), per_family)
    ]


def score(
    generator: Generator,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    on_answer: Callable[[int], None] = lambda done: None,
) -> Score:
    """Asks every question, each from an empty state, with the generator's settings."""
    answers = []
    for example in examples:
        prompt = tokenizer.render(
            example.messages, enable_thinking=example.think, tools=example.tools or None
        )
        generator.state.reset()
        for _ in generator.run(tokenizer.encode(prompt)):
            pass
        result = generator.result
        if result is None:
            raise RuntimeError("a run ended without a result")
        text = tokenizer.decode(result.text_ids)
        answers.append(
            Answered(
                example,
                text,
                grade(example, text),
                tokens=len(result.token_ids),
                previews=result.stats.previews,
                forwards=result.stats.forwards,
            )
        )
        on_answer(len(answers))
    return Score(tuple(answers))
