"""What the loop guard does, in whole runs of a model that is forced to loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from torch import Tensor

from clover_local.decoding.repetition.guard import RETRIES, STRENGTH, LoopGuard, Verdict
from clover_local.decoding.settings import resolve
from clover_local.generate import generate
from clover_local.session import Session, load, open_model
from tests.conftest import answer_of

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

GOOD = 40
MODES = pytest.mark.parametrize("mode", ["denoise", "ar", "draft", "auto"])


def forced(position: int) -> int:
    """Good for 40 tokens behind a prompt of one, then the same for ever."""
    return (position * 7) % 40 if position < 1 + GOOD else 5


@MODES
def test_off_lets_it_loop_and_on_does_not_touch_what_does_not_loop(
    mode: str, scripted: Scripted
) -> None:
    looping, fine = scripted.model(answer=forced), scripted.model(answer=lambda p: (p * 7) % 40)
    off = scripted.settings(mode=mode, max_new_tokens=160)
    result = generate(looping, scripted.state(), off, [1])
    assert (result.finish_reason, len(result.tokens)) == ("length", 160)
    on = scripted.settings(mode=mode, max_new_tokens=100, loop_guard="stop")
    without = scripted.settings(mode=mode, max_new_tokens=100)
    assert (
        generate(fine, scripted.state(), on, [1]).token_ids
        == generate(fine, scripted.state(), without, [1]).token_ids
    )


@MODES
@pytest.mark.parametrize("action", ["stop", "raise", "retry"])
def test_a_model_forced_to_loop_is_stopped_and_what_was_good_is_kept(
    action: str, mode: str, scripted: Scripted
) -> None:
    """Penalties that rise long enough also make `ar` leave the loop, here for a stop token."""
    model = scripted.model(answer=forced, confidence=lambda p: 1 - 1e-15)
    state = scripted.state(2000)
    settings = scripted.settings(mode=mode, max_new_tokens=1900, loop_guard=action)
    result = generate(model, state, settings, [1])
    may_leave = mode != "denoise" and action != "stop"
    assert result.finish_reason in ("repetition", *["stop"] * may_leave)
    assert result.token_ids[:GOOD] == tuple(forced(1 + i) for i in range(GOOD))
    assert len(result.tokens) < 400
    pending = {"denoise": {0}, "auto": {0, 1}}.get(mode, {1})
    assert 1 + len(result.tokens) - state.length in pending


@MODES
@pytest.mark.parametrize("period", [2, 3, 7, 13])
@pytest.mark.parametrize("action", ["off", "stop", "raise", "retry"])
def test_a_model_forced_to_repeat_an_ngram_is_stopped_unless_the_guard_is_off(
    action: str, period: int, mode: str, scripted: Scripted
) -> None:
    """Good for 40 tokens, then the same few in turn for ever, however often they were written."""

    def answer(position: int) -> int:
        return forced(position) if position < 1 + GOOD else 20 + (position - 1 - GOOD) % period

    model = scripted.model(answer=answer, confidence=lambda p: 1 - 1e-15)
    given = {"mode": mode, "max_new_tokens": 700, "loop_guard": action}
    result = generate(model, scripted.state(2000), scripted.settings(**given), [1])
    made = [answer(1 + i) for i in range(len(result.tokens))]
    if action == "off":
        assert (result.finish_reason, list(result.token_ids)) == ("length", made)
        return
    assert list(result.token_ids[: GOOD + period]) == made[: GOOD + period]
    if action == "stop" or mode == "denoise":
        assert result.finish_reason == "repetition"
        # Penalties that rise long enough outweigh what the model wants.
        assert list(result.token_ids) == made or action == "raise"
    assert len(result.tokens) < 400


@pytest.mark.parametrize("action", ["stop", "raise", "retry"])
def test_a_loop_of_tokens_that_stand_in_for_repeats_is_stopped_too(
    action: str, scripted: Scripted
) -> None:
    """The model wants 5 for ever, and no two neighbours may be equal."""
    model = scripted.model(answer=forced, confidence=lambda p: 1 - 1e-15)
    given = {"max_new_tokens": 700, "loop_guard": action, "in_block_repetition": True}
    result = generate(model, scripted.state(2000), scripted.settings(**given), [1])
    assert result.finish_reason == "repetition" and len(result.tokens) < 400
    assert result.token_ids[:GOOD] == tuple(forced(1 + i) for i in range(GOOD))
    assert not any(a == b for a, b in pairwise(result.token_ids))


def test_what_the_guard_raises_makes_no_row_look_surer(scripted: Scripted) -> None:
    """As every control of ours: the lesser of a token's probability with and without it counts."""
    for action in ("raise", "retry"):
        settings = scripted.settings(loop_guard=action)
        guard = LoopGuard(settings)
        assert not settings.has_own_controls and settings.plain_threshold
        guard.judge([], [5] * 32)
        assert guard.settings.has_own_controls and not guard.settings.plain_threshold


def test_denoise_stops_behind_the_first_round(scripted: Scripted) -> None:
    settings = scripted.settings(max_new_tokens=400, loop_guard="stop")
    result = generate(scripted.model(answer=forced), scripted.state(), settings, [1])
    assert result.token_ids == (*[forced(1 + i) for i in range(GOOD)], 5)


def test_a_block_is_tried_again_before_anything_of_it_is_committed(scripted: Scripted) -> None:
    model = scripted.model(answer=lambda p: 5, confidence=lambda p: 1 - 1e-15)
    settings = scripted.settings(max_new_tokens=400, loop_guard="retry")
    result = generate(model, scripted.state(), settings, [1])
    assert (result.finish_reason, result.token_ids) == ("repetition", (5,))
    assert model.commits == [[1], [5]]
    masks = [block for block in model.previews if set(block) == {49}]
    assert len(masks) == 1 + RETRIES


def test_in_auto_only_blocks_are_tried_again(scripted: Scripted) -> None:
    settings = scripted.settings(mode="auto", loop_guard="retry")
    guard = LoopGuard(settings)
    assert guard.judge([], [5] * 32) is Verdict.RETRY
    assert guard.settings.no_repeat_ngram and guard.settings.seed != settings.seed
    shown = LoopGuard(settings)
    assert shown.judge_shown([5] * 32) is Verdict.KEEP
    assert shown.settings.frequency_penalty == settings.frequency_penalty + STRENGTH


def test_in_auto_a_looping_block_counts_once_whatever_mode_follows(scripted: Scripted) -> None:
    guard = LoopGuard(scripted.settings(mode="auto", loop_guard="raise"))
    guard.judge([], [5] * 32)
    raised = guard.settings
    for length in range(33, 64):
        guard.judge_shown([5] * length)
    assert guard.settings == raised
    guard.judge_shown([5] * 64)
    assert guard.settings.frequency_penalty == raised.frequency_penalty + STRENGTH


def test_another_try_may_leave_the_loop(scripted: Scripted) -> None:
    """The second block loops where 5 is not penalised for the first; without, it counts up."""

    def near(logits: Tensor, start: int) -> None:
        logits[:, 5] = logits.amax(-1) + (0.1 if start >= 33 else -0.1)

    model = scripted.model(answer=lambda p: p % 16 if p < 33 else 16 + p % 30, rewrite=near)
    settings = scripted.settings(max_new_tokens=64, loop_guard="retry", threshold=0.4)
    result = generate(model, scripted.state(), settings, [1])
    assert result.finish_reason == "length"
    assert len(set(result.token_ids[32:])) > 20
    assert model.previews.count([49] * 32) == 3


@pytest.fixture(scope="module")
def demo() -> Session:
    opened = open_model("demo")
    given = {"accept": "exact", "frequency_penalty": 0, "presence_penalty": 0}
    given |= {"max_new_tokens": 100, "suppress": opened.generation.stop_ids}
    return load(opened, resolve(opened.config, opened.generation, given).settings, device="cpu")


@pytest.mark.parametrize("action", ["raise", "retry", "stop"])
@pytest.mark.parametrize("text", ["1 2 3 4 5 6 7 8 9 10", "Once upon a time"])
def test_exact_drafts_write_what_ar_writes_under_the_guard_too(
    text: str, action: str, demo: Session
) -> None:
    """The guard looks at the same places, whatever the rounds were."""
    prompt, texts = demo.opened.tokenizer.encode(text), []
    for mode in ("ar", "draft"):
        given = replace(demo.generator.settings, mode=mode, loop_guard=action)
        demo.generator.settings = given
        demo.generator.state.reset()
        texts.append(answer_of(demo, prompt))
    assert texts[0] == texts[1]
