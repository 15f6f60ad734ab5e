"""`auto`: any mode after any other, what is measured, and that it costs little."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.events import Finished
from clover_local.decoding.result import Clock, GenerationResult
from clover_local.decoding.run import Run
from clover_local.decoding.settings import resolve
from clover_local.decoding.trace import Trace
from clover_local.demo.score import held_out
from clover_local.generate import Generator
from clover_local.session import Session, load, open_model

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

FLOOR = (7.4, 2.9, 4.4)
"""Milliseconds of a preview, a commit and a verify of the real model on a card."""
SLOW_PREVIEWS = (35.0, 8.0, 55.0)


def counted(costs: tuple[float, float, float]) -> Callable[[Clock], tuple[float, float]]:
    """A clock of forwards instead of seconds."""
    preview, commit, verify = costs
    return lambda clock: (
        preview * clock.previews,
        commit * clock.commits + verify * clock.verifies,
    )


def answer(generator: Generator, prompt: list[int]) -> GenerationResult:
    *_, last = generator.run(prompt)
    assert isinstance(last, Finished)
    return last.result


def generator_of(
    scripted: Scripted,
    costs: tuple[float, float, float],
    *,
    trace: Trace | None = None,
    **given: Any,
) -> Generator:
    state = scripted.state(context=5000)
    settings = scripted.settings(mode="auto", **given)
    generator = Generator(scripted.model(), state, settings, trace=trace)
    generator.modes["auto"] = Auto(costs=counted(costs))
    return generator


def test_every_token_is_right_whichever_modes_follow_each_other(scripted: Scripted) -> None:
    generator = generator_of(scripted, (1.0, 1.0, 1.0), max_new_tokens=700)
    result = answer(generator, [0, 1, 2])
    assert result.token_ids == tuple((3 + i) % 40 for i in range(700))
    assert set(MODES) == {token.mode for token in result.tokens}
    assert result.mode == "auto"
    committed = generator.state.committed.tokens
    assert committed == ((0, 1, 2, *result.token_ids))[: len(committed)]
    assert len(committed) >= 702


@pytest.mark.parametrize(
    ("costs", "best"), [(FLOOR, "denoise"), (SLOW_PREVIEWS, "denoise"), ((50.0, 1.0, 9.0), "ar")]
)
def test_the_mode_depends_on_what_forwards_cost(
    costs: tuple[float, float, float], best: str, scripted: Scripted
) -> None:
    result = answer(generator_of(scripted, costs, max_new_tokens=1500), [0, 1, 2])
    counts = Counter(token.mode for token in result.tokens)
    assert counts[best] > 0.8 * 1500
    assert result.auto is not None
    assert result.auto.mode == best


def test_the_trace_has_the_schedule(scripted: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Trace(path, model_hash="x") as trace:
        generator = generator_of(scripted, FLOOR, trace=trace, max_new_tokens=400)
        result = answer(generator, [0, 1, 2])
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    choices = [record for record in records if record["record"] == "choice"]
    assert choices[0] == {
        "record": "choice",
        "mode": "ar",
        "is_probe": True,
        "at": 0,
        "why": "not measured yet",
    }
    for number, token in enumerate(result.tokens):
        last = [choice for choice in choices if choice["at"] <= number][-1]
        assert token.mode == last["mode"]


def test_only_the_named_modes_run_and_another_list_starts_afresh(scripted: Scripted) -> None:
    generator = generator_of(scripted, FLOOR, max_new_tokens=200, auto=("draft", "ar"))
    assert {token.mode for token in answer(generator, [0, 1]).tokens} == {"draft", "ar"}
    generator.settings = replace(generator.settings, auto=("ar",))
    result = answer(generator, [5, 6])
    assert {token.mode for token in result.tokens} == {"ar"}
    assert result.auto is not None
    assert [rate.mode for rate in result.auto.rates] == ["ar"]


def test_a_probe_whose_block_is_resolved_is_not_left(scripted: Scripted) -> None:
    """With `eos_order` the rows behind a stop token stay masked; they cost nothing any more."""
    model = scripted.model(
        answer=lambda p: 48 if p == 2 else 5, confidence=lambda p: 0.99 if p == 2 else 0.3
    )
    settings = scripted.settings(mode="auto", auto=("ar", "denoise"), eos_order=True)
    generator = Generator(model, scripted.state(), settings)
    generator.modes["auto"] = Auto(costs=counted((100.0, 1.0, 9.0)))
    tokens = answer(generator, [1]).tokens
    assert [(token.token, token.mode) for token in tokens] == [
        (5, "ar"),
        (48, "denoise"),
    ]


def test_a_stopped_answer_is_not_judged(scripted: Scripted) -> None:
    model, auto = scripted.model(confidence=lambda position: 0.3), Auto(costs=counted(FLOOR))
    settings = scripted.settings(mode="auto", auto=("denoise", "draft"))
    run = Run(
        model, scripted.state(), settings, prompt_tokens=1, should_stop=lambda: bool(model.previews)
    )
    run.commit_prompt([1], logits=True)
    list(auto.block(run))
    assert run.finish_reason == "cancelled"
    assert run.auto is None


def test_the_json_of_an_answer_says_what_auto_knows(scripted: Scripted) -> None:
    result = answer(generator_of(scripted, FLOOR, max_new_tokens=200), [0, 1])
    found: Any = result.to_json(text="")["auto"]
    assert result.auto is not None
    assert (found["mode"], found["why"]) == (result.auto.mode, result.auto.line)
    speeds = [rate["tokens_per_second"] for rate in found["rates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert set(found["rates"][0]) == {
        "mode",
        "tokens_per_second",
        "tokens_per_forward",
        "ms_per_forward",
    }
    assert (found["probes"], found["changes"]) == (result.auto.probes, result.auto.changes)
    alone = replace(result, auto=None)
    assert "auto" not in alone.to_json(text="")


@pytest.fixture(scope="module")
def session() -> Session:
    opened = open_model("demo")
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 256}).settings
    return load(opened, settings, device="cpu")


def prompts(session: Session, *, per_family: int) -> list[list[int]]:
    """Held-out questions of all kinds, mixed."""
    examples = held_out(5, per_family=per_family)
    random.Random(1).shuffle(examples)
    tokenizer = session.opened.tokenizer
    return [
        tokenizer.encode(
            tokenizer.render(
                example.messages, enable_thinking=example.think, tools=example.tools or None
            )
        )
        for example in examples
    ]


def test_exact_drafts_and_ar_in_turns_write_what_ar_writes(session: Session) -> None:
    generator = session.generator
    generator.modes["auto"] = Auto(costs=counted(FLOOR))
    texts: dict[str, list[tuple[int, ...]]] = {"ar": [], "auto": []}
    for mode, written in texts.items():
        generator.settings = replace(
            generator.settings, mode=mode, accept="exact", auto=("draft", "ar")
        )
        for prompt in prompts(session, per_family=1):
            generator.state.reset()
            written.append(answer(generator, prompt).token_ids)
    assert texts["auto"] == texts["ar"]


def clocks(session: Session, mode: str, questions: Sequence[Sequence[int]]) -> list[Clock]:
    """The forwards of each answer in a mode."""
    generator = session.generator
    generator.settings = replace(
        generator.settings, mode=mode, accept="typical", auto=("denoise", "draft", "ar")
    )
    made = []
    for prompt in questions:
        generator.state.reset()
        stats, rounds = answer(generator, list(prompt)).stats, generator.result
        assert rounds is not None
        verifies = len(rounds.rounds)
        made.append(Clock(previews=stats.previews, commits=stats.commits - verifies))
        made[-1].verifies = verifies
    return made


@pytest.fixture(scope="module")
def in_single_modes(session: Session) -> dict[tuple[int, ...], dict[str, Clock]]:
    """The forwards of each question in each mode."""
    questions = prompts(session, per_family=8)
    made: dict[tuple[int, ...], dict[str, Clock]] = {tuple(prompt): {} for prompt in questions}
    for mode in MODES:
        for prompt, clock in zip(questions, clocks(session, mode, questions), strict=True):
            made[tuple(prompt)][mode] = clock
    return made


def test_a_block_that_takes_a_pass_a_row_is_left_once_and_not_tried_again(
    scripted: Scripted,
) -> None:
    """At the published costs of another engine; drafts do not hold either."""
    model = scripted.model(confidence=lambda position: 0.3)
    settings = scripted.settings(mode="auto", max_new_tokens=400, auto=("denoise", "ar"))
    generator = Generator(model, scripted.state(context=5000), settings)
    generator.modes["auto"] = Auto(costs=counted((35.0, 8.0, 55.0)))
    result = answer(generator, [0, 1, 2])
    assert result.token_ids == tuple((3 + i) % 40 for i in range(400))
    assert len(model.previews) <= 4
    assert {token.mode for token in result.tokens} == {"ar"}


def test_text_that_turns_slow_in_a_fast_mode_is_left_to_another(scripted: Scripted) -> None:
    model = scripted.model(confidence=lambda position: 0.99 if position < 300 else 0.3)
    settings = scripted.settings(mode="auto", max_new_tokens=700, auto=("denoise", "ar"))
    generator = Generator(model, scripted.state(context=5000), settings)
    generator.modes["auto"] = Auto(costs=counted((35.0, 8.0, 55.0)))
    result = answer(generator, [0, 1, 2])
    modes = [token.mode for token in result.tokens]
    assert modes[100:280] == ["denoise"] * 180
    assert modes[400:].count("ar") >= 250
    assert result.token_ids == tuple((3 + i) % 40 for i in range(700))


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1], ids="order-{}".format)
@pytest.mark.parametrize(
    "costs",
    [FLOOR, SLOW_PREVIEWS, (7.4, 6.0, 3.0), (1.0, 1.0, 1.0)],
    ids=["floor", "slow previews", "cheap verifies", "all alike"],
)
def test_mixed_questions_cost_little_more_than_in_the_best_single_mode(
    costs: tuple[float, float, float],
    order: int,
    session: Session,
    in_single_modes: dict[tuple[int, ...], dict[str, Clock]],
) -> None:
    """In counted forwards, of which finding out which mode is the best is a part."""
    questions = list(in_single_modes)
    random.Random(order).shuffle(questions)
    cost = counted(costs)
    session.generator.modes["auto"] = Auto(costs=cost)
    ours = sum(sum(cost(clock)) for clock in clocks(session, "auto", questions))
    best = min(sum(sum(cost(each[mode])) for each in in_single_modes.values()) for mode in MODES)
    assert ours <= best / 0.93


def test_tasks_whose_best_modes_differ_get_different_modes(scripted: Scripted) -> None:
    """Sure text resolves in a pass; doubtful text takes a pass a row, and drafts of it hold."""
    used = {}
    for name, confidence in (("sure", 0.99), ("doubtful", 0.6)):
        model = scripted.model(confidence=lambda position, c=confidence: c)
        settings = scripted.settings(mode="auto", max_new_tokens=600)
        generator = Generator(model, scripted.state(context=5000), settings)
        generator.modes["auto"] = Auto(costs=counted(FLOOR))
        result = answer(generator, [0, 1, 2])
        used[name] = Counter(token.mode for token in result.tokens).most_common(1)[0][0]
    assert used == {"sure": "denoise", "doubtful": "draft"}
