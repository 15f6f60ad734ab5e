"""Advice in a mode that was set: what it is made of, and that it changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.auto.spectator import Spectator
from clover_local.decoding.events import Finished
from clover_local.decoding.result import Clock, GenerationResult
from clover_local.decoding.settings import resolve
from clover_local.generate import Generator
from clover_local.placement import MemoryOptions
from clover_local.session import Session, load, open_model

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted, ScriptedModel

PREVIEW, COMMIT, VERIFY = 7.4, 2.9, 4.4
"""Milliseconds of the real model on a card."""


def answer(generator: Generator, prompt: list[int]) -> GenerationResult:
    *_, last = generator.run(prompt)
    assert isinstance(last, Finished)
    return last.result


def costs(clock: Clock) -> tuple[float, float]:
    return PREVIEW * clock.previews, COMMIT * clock.commits + VERIFY * clock.verifies


def clock_of(model: ScriptedModel) -> Callable[[], float]:
    """A clock that only forwards move; a verify of one row costs what a commit does."""

    def seconds() -> float:
        verifies = sum(COMMIT if len(rows) == 1 else VERIFY for rows in model.verifies)
        return (PREVIEW * len(model.previews) + COMMIT * len(model.commits) + verifies) / 1000

    return seconds


def watched(scripted: Scripted, model: ScriptedModel, mode: str) -> Generator:
    """A generator whose answers are watched, by counted costs."""
    settings = scripted.settings(mode=mode, max_new_tokens=200)
    generator = Generator(model, scripted.state(context=5000), settings)
    generator.spectator = Spectator(Auto(costs=costs), clock=clock_of(model))
    return generator


SURE: Callable[[int], float] = lambda position: 0.99  # noqa: E731
DOUBTFUL: Callable[[int], float] = lambda position: 0.6  # noqa: E731


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("confidence", "best"), [(SURE, "denoise"), (DOUBTFUL, "draft")], ids=["sure", "doubtful"]
)
def test_the_mode_that_would_be_faster_is_named(
    confidence: Callable[[int], float], best: str, mode: str, scripted: Scripted
) -> None:
    """Sure text resolves in a pass; doubtful text takes a pass a row, and drafts of it hold."""
    model = scripted.model(confidence=confidence)
    generator = watched(scripted, model, mode)
    for prompt in ([0, 1, 2], [7], [9, 10], [3]):
        answer(generator, prompt)
        advice = generator.advice()
    assert (advice.mode if advice else mode) == best
    assert (advice is None) == (mode == best)


def test_only_modes_that_auto_may_run_are_named(scripted: Scripted) -> None:
    generator = watched(scripted, scripted.model(), "ar")
    generator.settings = replace(generator.settings, auto=("draft", "ar"))
    answer(generator, [1])
    advice = generator.advice()
    assert advice is not None
    assert advice.mode == "draft"
    generator.settings = replace(generator.settings, auto=("denoise", "draft"))
    answer(generator, [1])
    assert generator.advice() is None


def test_forwards_are_rehearsed_once(scripted: Scripted) -> None:
    model = scripted.model()
    generator = watched(scripted, model, "denoise")
    answer(generator, [1])
    generator.advice()
    made = (len(model.previews), len(model.verifies))
    assert made[1] == 4  # two of a draft, two of one row
    generator.advice()
    assert (len(model.previews), len(model.verifies)) == made


def test_ar_makes_a_proposal_for_answers_1_2_4_and_8(scripted: Scripted) -> None:
    model = scripted.model()
    generator = watched(scripted, model, "ar")
    made = []
    for _ in range(8):
        before = len(model.previews)
        answer(generator, [1])
        made.append(len(model.previews) - before)
    assert made == [1, 1, 0, 1, 0, 0, 0, 1]


def test_a_slow_machine_rehearses_nothing(scripted: Scripted) -> None:
    model = scripted.model()
    generator = watched(scripted, model, "denoise")
    slow = Auto(costs=lambda clock: (900.0 * clock.previews, 900.0 * clock.commits))
    generator.spectator = Spectator(slow, clock=clock_of(model))
    answer(generator, [1])
    assert generator.advice() is None
    assert model.verifies == []


def test_without_memory_there_is_no_advice(scripted: Scripted) -> None:
    model = scripted.model()
    generator = watched(scripted, model, "denoise")
    answer(generator, [1])

    def full(forwards: int) -> None:
        raise torch.OutOfMemoryError

    model.before_forward = full
    assert generator.advice() is None


@pytest.fixture(scope="module")
def session(golden_folder: Path) -> Session:
    opened = open_model(str(golden_folder))
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 70}).settings
    return load(opened, settings, device="cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_that_is_watched_is_the_same(
    mode: str, temperature: float, session: Session
) -> None:
    generator = session.generator
    generator.settings = replace(generator.settings, mode=mode, temperature=temperature)
    texts = []
    for watches in (False, True):
        generator.spectator = Spectator(generator.auto) if watches else None
        generator.state.reset()
        written = []
        for prompt in ([5, 6, 7], [5, 6, 7, 8, 9], [11]):
            result = answer(generator, prompt)
            written.append((result.token_ids, result.stats.forwards, result.mode))
            if watches:
                generator.advice()
            written.append((tuple(generator.state.committed.tokens), 0, ""))
        texts.append(written)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mode", MODES)
def test_where_experts_lie_off_the_device_nothing_is_rehearsed(
    mode: str, golden_folder: Path
) -> None:
    """It would move them: what a cache counts is the same with advice and without."""
    counts = []
    for watches in (False, True):
        opened = open_model(str(golden_folder))
        given = {"mode": mode, "max_new_tokens": 40}
        settings = resolve(opened.config, opened.generation, given).settings
        memory = MemoryOptions(expert_slots=30)
        session = load(opened, settings, device="cpu", memory=memory)
        generator = session.generator
        generator.spectator = Spectator(generator.auto) if watches else None
        for prompt in ([5, 6, 7], [9, 8]):
            answer(generator, prompt)
            assert generator.advice() is None
        stats = session.model.experts.stats()
        assert stats is not None
        counts.append((stats.counts, stats.copied.bytes))
    assert counts[0] == counts[1]
