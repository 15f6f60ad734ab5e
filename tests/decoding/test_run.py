"""Book-keeping that all modes share, and Ctrl-C at every line of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from clover_local.decoding.events import BlockCommitted, Finished
from clover_local.decoding.pick import ControlledRows, RowStatistics
from clover_local.decoding.result import emitted_length
from clover_local.errors import ResourceError
from clover_local.generate import Generator, generate

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted


@pytest.mark.parametrize(
    "tokens, allowed, length",
    [([1, 2, 3], 9, 3), ([1, 9, 9], 9, 2), ([9, 1], 5, 1), ([1, 2, 9], 2, 2), ([1], 1, 1)],
)
def test_emitted_length(tokens: list[int], allowed: int, length: int) -> None:
    assert emitted_length(tokens, stop_ids=(9, 10), allowed=allowed) == length


def test_experts_that_the_forward_has_counted_are_taken_from_it(scripted: Scripted) -> None:
    model = scripted.model(experts_counted=7)
    result = generate(model, scripted.state(), scripted.settings(max_new_tokens=32), [1])
    assert result.stats.distinct_experts_per_layer == 7 / 2  # the model has two layers


@contextmanager
def interrupt_at_line(number: int) -> Iterator[Callable[[], int]]:
    """Raises KeyboardInterrupt at the n-th line of the package that runs; yields the line count."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if "clover_local" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft", "auto"])
def test_interrupt_at_any_line_loses_nothing_that_was_shown(scripted: Scripted, mode: str) -> None:
    """Every 41st line of a run: shown tokens are committed, the next turn is right."""
    settings = scripted.settings(mode=mode, max_new_tokens=5 if mode == "ar" else 36)
    prompt, interrupted, number = [7, 8, 9], 0, 1
    while True:
        state, shown = scripted.state(), list[int]()
        generator = Generator(scripted.model(), state, settings)
        try:
            with interrupt_at_line(number):
                for event in generator.run(prompt):
                    if isinstance(event, BlockCommitted):
                        shown += event.tokens
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        committed, everything = list(state.committed.tokens), [*prompt, *shown]
        pending = mode != "denoise" and bool(shown)
        if shown:
            assert committed[: len(everything) - pending] == everything[: len(everything) - pending]
        if generator.result is not None:
            assert list(generator.result.token_ids[: len(shown)]) == shown
        question = [*everything, 3, 3]
        assert next_turn(generator, question) == next_turn(
            Generator(scripted.model(), scripted.state(), settings), question
        )
        assert list(state.committed.tokens[: len(question)]) == question
        number += 41
    assert interrupted > 10


def next_turn(generator: Generator, question: list[int]) -> tuple[int, ...]:
    *_, last = generator.run(question)
    assert isinstance(last, Finished)
    return last.result.token_ids


def test_errors_propagate_and_leave_no_result(scripted: Scripted) -> None:
    def fail(forwards: int) -> None:
        if forwards == 2:
            raise RuntimeError("broken")

    model = scripted.model(before_forward=fail)
    generator = Generator(model, scripted.state(), scripted.settings())
    with pytest.raises(RuntimeError, match="broken"):
        list(generator.run([1]))
    assert generator.result is None
    model.before_forward = lambda forwards: None
    settings = scripted.settings(max_new_tokens=3)
    assert generate(model, generator.state, settings, [1, 1]).token_ids == (2, 3, 4)


@pytest.mark.parametrize("sampler", ["klass", "credit", "factor", "threshold"])
def test_a_pick_without_room_is_made_again_with_fewer_experts_on_the_device(
    sampler: str, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third and the fifth end half-way; what a rule remembers of a block is counted once."""
    given = {"sampler": sampler, "sampler_kl": 1.0, "threshold": 0.9, "temperature": 0.5}
    settings = scripted.settings(max_new_tokens=40, sampler_min_per_pass=1, **given)
    confidence = {"confidence": lambda p: 0.3 + p % 11 / 20}
    expected = generate(scripted.model(**confidence), scripted.state(), settings, [1])
    statistics, calls, said = ControlledRows.statistics, list[None](), list[str]()

    def failing(self: ControlledRows, token: Tensor) -> RowStatistics:
        calls.append(None)
        if len(calls) in (3, 5):
            raise torch.OutOfMemoryError("no room")
        return statistics(self, token)

    monkeypatch.setattr(ControlledRows, "statistics", failing)
    model = scripted.model(**confidence)
    model.give_up_memory = lambda: "fewer expert slots"  # type: ignore[method-assign, assignment]
    generator = Generator(model, scripted.state(), settings, on_note=said.append)
    *_, last = generator.run([1])
    assert isinstance(last, Finished)
    assert last.result.blocks == expected.blocks and len(expected.blocks[0].passes) > 5
    assert said == ["fewer expert slots"] * 2


def test_a_pick_without_room_and_with_nothing_to_give_up_is_one_sentence(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: ControlledRows, token: Tensor) -> RowStatistics:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ControlledRows, "statistics", failing)
    for given in ({"sampler": "klass"}, {"mode": "ar"}, {"mode": "draft"}):
        with pytest.raises(ResourceError, match="nothing left to give up"):
            generate(scripted.model(), scripted.state(), scripted.settings(**given), [1])
