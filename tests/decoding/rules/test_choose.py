"""Every rule and modifier against a second statement of its line in the table of rules.

Plain Python over lists; random tables with many ties, in which every number has a few values only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from clover_local.decoding.keys import SAMPLERS
from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.choose import choose
from clover_local.decoding.settings import Settings

MASK = 63
CONFIDENCES = (0.0, 0.125, 0.375, 0.4375, 0.5, 0.875, 0.96875, 1.0)
"""Exact in binary, so that sums and bounds are the same numbers here and there."""
ENTROPIES = (0.0, 0.0625, 0.125, 0.5, 2.0)


@dataclass(frozen=True)
class Case:
    """Rows of a block in one pass."""

    confidence: list[float]
    second: list[float]
    entropy: list[float]
    still: list[int]
    places: list[int]
    pass_number: int

    @property
    def count(self) -> int:
        return len(self.confidence)

    def statistics(self) -> RowStatistics:
        return RowStatistics(
            token=torch.arange(self.count),
            confidence=torch.tensor(self.confidence),
            raw_confidence=torch.full((self.count,), math.nan),  # without our controls nobody reads
            entropy=torch.tensor(self.entropy),
            top_ids=torch.stack([torch.arange(self.count), torch.full((self.count,), 50)], 1),
            top_probabilities=torch.tensor([self.confidence, self.second]).T,
            still_passes=torch.tensor(self.still),
        )


def case(seed: int) -> Case:
    chance = random.Random(seed)
    places = sorted(chance.sample(range(32), chance.choice([1, 2, 5, 11, 32])))
    confidence = [chance.choice(CONFIDENCES) for _ in places]
    return Case(
        confidence=confidence,
        second=[chance.choice([0.0, 0.25, 0.5, 1.0]) * (1 - c) for c in confidence],
        entropy=[chance.choice(ENTROPIES) for _ in places],
        still=[chance.randrange(4) for _ in places],
        places=places,
        pass_number=chance.randrange(10),
    )


Given = dict[str, Any]


def surest(rows: Case, among: set[int] | None = None) -> list[int]:
    """Rows by falling confidence, the lower first among equals."""
    among = set(range(rows.count)) if among is None else among
    return sorted(among, key=lambda row: (-rows.confidence[row], row))


def above(rows: Case, bound: float) -> set[int]:
    return {row for row in range(rows.count) if rows.confidence[row] > bound}


def by_factor(rows: Case, s: Given, bound: float) -> set[int]:
    order, best = surest(rows), 0
    for n in range(1, rows.count + 1):
        if (n + 1) * (1 - rows.confidence[order[n - 1]]) < s["sampler_factor"]:
            best = n
    return set(order[:best])


def by_entropy(rows: Case, s: Given, bound: float) -> set[int]:
    order = sorted(
        range(rows.count), key=lambda row: (rows.entropy[row], -rows.confidence[row], row)
    )
    taken = set[int]()
    for k in range(1, rows.count + 1):
        first = [rows.entropy[row] for row in order[:k]]
        if sum(first) - max(first) > s["sampler_gamma"]:
            break
        taken.add(order[k - 1])
    return taken


def by_hierarchy(rows: Case, s: Given, bound: float) -> set[int]:
    taken = above(rows, bound)
    runs: list[list[int]] = []
    for row, place in enumerate(rows.places):
        if row and rows.places[row - 1] == place - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    for run in runs:
        best = surest(rows, set(run))[0]
        if rows.confidence[best] > s["sampler_low"]:
            taken.add(best)
    return taken


def by_margin(rows: Case, s: Given, bound: float) -> set[int]:
    ahead = [c - second for c, second in zip(rows.confidence, rows.second, strict=True)]
    return {row for row in range(rows.count) if ahead[row] > s["sampler_margin"]}


def by_steps(rows: Case, s: Given, bound: float) -> set[int]:
    left = max(s["sampler_steps"] - rows.pass_number, 1)
    return set(surest(rows)[: math.ceil(rows.count / left)])


def by_stillness(rows: Case, s: Given, bound: float) -> set[int]:
    sure = above(rows, bound)
    return {row for row in sure if rows.still[row] >= s["sampler_history"]}


RULES: dict[str, Callable[[Case, Given, float], set[int]]] = {
    "threshold": lambda rows, s, bound: above(rows, bound),
    "credit": lambda rows, s, bound: above(rows, bound),
    "factor": by_factor,
    "entropy_bound": by_entropy,
    "margin": by_margin,
    "fixed_steps": by_steps,
    "sequential": lambda rows, s, bound: set(range(min(s["sampler_k"], rows.count))),
    "klass": by_stillness,
    "hierarchy": by_hierarchy,
}
KNOBS: dict[str, tuple[str, list[Any]]] = {
    "threshold": ("threshold", [0.0, 0.4375, 0.875, 1.0]),
    "credit": ("threshold", [0.0, 0.4375, 0.875, 1.0]),
    "factor": ("sampler_factor", [0.0, 0.25, 1.0, 2.5, 99.0]),
    "entropy_bound": ("sampler_gamma", [0.0, 0.0625, 0.25, 1.0, 99.0]),
    "margin": ("sampler_margin", [0.0, 0.25, 0.75, 1.0]),
    "fixed_steps": ("sampler_steps", [1, 2, 8, 99]),
    "sequential": ("sampler_k", [1, 3, 99]),
    "klass": ("sampler_history", [1, 2, 3]),
    "hierarchy": ("sampler_low", [0.0, 0.375, 0.875, 1.0]),
}


def expected(rows: Case, s: Given) -> set[int]:
    """Rule, then at least, at most, and the early finish."""
    start = s["sampler_threshold"] if s["sampler"] == "klass" else s["threshold"]
    bound = max(start - s["sampler_threshold_decay"] * rows.pass_number, 0.0)
    taken = RULES[s["sampler"]](rows, s, bound) or {surest(rows)[0]}
    least, most = s["sampler_min_per_pass"], s["sampler_max_per_pass"]
    others = surest(rows, set(range(rows.count)) - taken)
    taken |= set(others[: max(least - len(taken), 0)])
    if most:
        taken = set(surest(rows, taken)[:most])
    if s["sampler_finish_gap"]:
        tiny = 2.0**-126
        gaps = [
            math.log(max(c, tiny)) - math.log(max(second, tiny))
            for c, second in zip(rows.confidence, rows.second, strict=True)
        ]
        resolved = 32 - rows.count
        needed = 7.5 if 3 * resolved < 32 else 5.0 if 3 * resolved < 64 else 2.5
        if sum(gaps) / len(gaps) >= needed:
            taken = set(range(rows.count))
    return taken


MODIFIERS: dict[str, Given] = {
    "plain": {},
    "decay": {"sampler_threshold_decay": 0.125},
    "at-least": {"sampler_min_per_pass": 3},
    "at-most": {"sampler_max_per_pass": 2},
    "bounds": {"sampler_min_per_pass": 2, "sampler_max_per_pass": 2},
    "finish": {"sampler_finish_gap": True},
    "all": {
        "sampler_threshold_decay": 0.0625,
        "sampler_min_per_pass": 2,
        "sampler_max_per_pass": 4,
        "sampler_finish_gap": True,
    },
}
OFF: Given = {
    "threshold": 0.875,
    "sampler_threshold": 0.4375,
    "sampler_threshold_decay": 0.0,
    "sampler_min_per_pass": 0,
    "sampler_max_per_pass": 0,
    "sampler_finish_gap": False,
}


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_random_tables_with_ties_are_decided_as_the_table_of_rules_says(
    sampler: str, modifier: str
) -> None:
    knob, values = KNOBS[sampler]
    sizes = set[int]()
    for seed in range(40):
        rows = case(seed)
        for value in values:
            given: Given = {**OFF, "sampler": sampler, knob: value, **MODIFIERS[modifier]}
            got = choose(
                rows.statistics(),
                Settings(mask_token_id=MASK, vocab_size=64, **given),
                places=rows.places,
                block_size=32,
                pass_number=rows.pass_number,
            )
            taken = set(got.accept.nonzero()[:, 0].tolist())
            assert taken == expected(rows, given), (seed, value)
            assert taken == {row for row, reason in enumerate(got.reasons) if reason}
            sizes.add(len(taken))
    assert len(sizes) > 1 or modifier == "bounds"


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("broken", [0, 3])
def test_a_confidence_that_is_nan_is_refused_under_every_modifier(
    broken: int, sampler: str, modifier: str
) -> None:
    rows = replace(case(2), confidence=[0.5] * 5, second=[0.25] * 5, entropy=[0.5] * 5)
    rows = replace(rows, still=[9] * 5, places=[*range(5)])
    rows.confidence[broken] = math.nan
    settings = Settings(mask_token_id=MASK, vocab_size=64, sampler=sampler, **MODIFIERS[modifier])
    with pytest.raises(ValueError, match=f"masked row {broken} has the .* NaN"):
        choose(rows.statistics(), settings, places=rows.places, block_size=32, pass_number=0)


@pytest.mark.parametrize(
    ("size", "masked", "needed"),
    [
        *((3, 3, 7.5), (3, 2, 5.0), (3, 1, 2.5)),
        *((30, 21, 7.5), (30, 20, 5.0), (30, 11, 5.0), (30, 10, 2.5)),
        *((31, 21, 7.5), (31, 10, 2.5)),
    ],
)
def test_bounds_of_the_early_finish_at_exact_thirds(size: int, masked: int, needed: float) -> None:
    """A third of the block is no longer under a third, and so with two."""
    for gap, finishes in ((needed + 0.01, True), (needed - 0.01, False)):
        second = 1 / (1 + math.exp(gap))
        rows = Case(
            confidence=[1 - second] * masked,
            second=[second] * masked,
            entropy=[0.0] * masked,
            still=[0] * masked,
            places=[*range(masked)],
            pass_number=0,
        )
        settings = Settings(
            mask_token_id=MASK, vocab_size=64, sampler="sequential", sampler_finish_gap=True
        )
        got = choose(
            rows.statistics(), settings, places=rows.places, block_size=size, pass_number=0
        )
        assert bool(got.accept.all()) == (finishes or masked == 1)
