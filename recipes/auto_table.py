"""The mode `auto` against each single mode on mixed questions of the demo model, as Markdown.

    python recipes/auto_table.py [--model FOLDER] [--questions 5] [--orders 5] [--seed 11]

Every question is answered in each mode and by `auto` in turn, so that a machine that is busy for a
while is so for all. First by the wall clock, then by counted forwards at given costs: those of the
real model at the floor of its card, those that another engine published, and two more.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.auto.watch import measured_costs
from clover_local.decoding.result import Clock, GenerationResult
from clover_local.decoding.settings import resolve
from clover_local.demo.score import held_out
from clover_local.session import Session, load, open_model

Costs = Callable[[Clock], tuple[float, float]]

COSTS: dict[str, tuple[float, float, float]] = {
    "floor of a 16 GB card": (7.4, 2.9, 4.4),
    "another engine": (35.0, 8.0, 55.0),
    "all forwards alike": (1.0, 1.0, 1.0),
    "cheap verifies": (7.4, 6.0, 3.0),
}
"""Milliseconds of a preview, a commit (one of `ar` too) and a verify."""


@dataclass
class Spent:
    """What the answers of a mode took."""

    milliseconds: float = 0.0
    tokens: int = 0


def answer(session: Session, prompt: list[int], mode: str) -> GenerationResult:
    """One answer from an empty state."""
    generator = session.generator
    generator.settings = replace(generator.settings, mode=mode)
    generator.state.reset()
    for _ in generator.run(prompt):
        pass
    assert generator.result is not None
    return generator.result


def clock_of(result: GenerationResult) -> Clock:
    """The forwards of an answer, and their seconds."""
    stats, rounds = result.stats, len(result.rounds)
    return Clock(
        previews=stats.previews,
        preview_seconds=stats.previews * (stats.ms_per_preview or 0.0) / 1000,
        commits=stats.commits - rounds,
        commit_seconds=stats.commits * (stats.ms_per_commit or 0.0) / 1000,
        verifies=rounds,
    )


def counted(costs: tuple[float, float, float]) -> Costs:
    """A clock of forwards instead of seconds."""
    preview, commit, verify = costs
    return lambda clock: (
        preview * clock.previews,
        commit * clock.commits + verify * clock.verifies,
    )


def table(
    session: Session, name: str, costs: Costs, prompts: list[list[int]], *, orders: int
) -> list[str]:
    """A line for each order of the questions."""
    lines = []
    for order in range(orders):
        shuffled = random.Random(order).sample(prompts, len(prompts))
        session.generator.modes["auto"] = Auto(costs=costs)
        spent = {mode: Spent() for mode in (*MODES, "auto")}
        used = Counter[str]()
        for number, prompt in enumerate(shuffled):
            print(f"\r{name}: {order + 1} of {orders}, {number:4}", end="", file=sys.stderr)
            for mode, each in spent.items():
                result = answer(session, prompt, mode)
                each.milliseconds += sum(costs(clock_of(result)))
                each.tokens += len(result.tokens)
                if mode == "auto":
                    used.update(token.mode for token in result.tokens)
        speeds = {mode: 1000 * each.tokens / each.milliseconds for mode, each in spent.items()}
        best = max(MODES, key=lambda mode: speeds[mode])
        shares = ", ".join(f"{mode} {100 * n / used.total():.0f} %" for mode, n in used.items())
        cells = [
            *(name, f"{order + 1}", *(f"{speed:.0f}" for speed in speeds.values())),
            *(best, f"{speeds['auto'] / speeds[best]:.2f}", shares),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=int, default=5, help="of each family")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args()
    opened = open_model(given.model)
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 256}).settings
    session = load(opened, settings, device="cpu")
    prompts = [
        opened.tokenizer.encode(
            opened.tokenizer.render(
                example.messages, enable_thinking=example.think, tools=example.tools or None
            )
        )
        for example in held_out(given.seed, per_family=given.questions)
    ]
    kinds: dict[str, Costs] = {"measured": measured_costs}
    kinds |= {name: counted(costs) for name, costs in COSTS.items()}
    heads = ("costs", "order", *MODES, "auto", "best", "auto / best", "auto ran")
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for name, costs in kinds.items():
        for line in table(session, name, costs, prompts, orders=given.orders):
            print(line, flush=True)
    print(file=sys.stderr)


if __name__ == "__main__":
    main()
