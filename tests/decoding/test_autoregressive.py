"""`ar` on a scripted model: one token a forward, at most one of them pending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clover_local.decoding.autoregressive import Autoregressive
from clover_local.decoding.denoise import Denoise
from clover_local.decoding.events import BlockCommitted
from clover_local.decoding.run import Run
from clover_local.generate import Generator, generate

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

STOP = 48


@pytest.mark.parametrize("limit", [1, 2, 33])
def test_one_forward_a_token_after_the_prompts_own(scripted: Scripted, limit: int) -> None:
    model, state = scripted.model(), scripted.state()
    settings = scripted.settings(mode="ar", max_new_tokens=limit)
    result = generate(model, state, settings, [0, 1, 2])
    assert result.token_ids == tuple((3 + i) % 40 for i in range(limit))
    assert (result.finish_reason, result.mode) == ("length", "ar")
    assert model.previews == []
    assert model.commits == [[0, 1, 2], *([t] for t in result.token_ids[:-1])]
    assert state.length == 3 + limit - 1
    assert (result.stats.commits, result.stats.previews) == (limit - 1, 0)
    assert result.stats.tokens_per_forward == (limit / (limit - 1) if limit > 1 else None)
    assert result.blocks == ()
    assert [token.confidence for token in result.tokens] == pytest.approx([0.99] * limit, abs=1e-5)


@pytest.mark.parametrize("place", [0, 15, 31])
def test_stop_token_ends_the_answer(scripted: Scripted, place: int) -> None:
    model = scripted.model(answer=lambda p: STOP if p == 2 + place else 5)
    result = generate(model, scripted.state(), scripted.settings(mode="ar"), [1, 2])
    assert result.finish_reason == "stop"
    assert result.token_ids == (*[5] * place, STOP)


def test_answer_ends_where_the_context_does(scripted: Scripted) -> None:
    model, state = scripted.model(), scripted.state(context=10)
    result = generate(model, state, scripted.settings(mode="ar"), [0, 1, 2])
    assert (result.finish_reason, len(result.tokens)) == ("context", 7)
    assert state.room == 1  # the last token is pending


def test_every_shown_token_but_the_last_is_committed(scripted: Scripted) -> None:
    state = scripted.state()
    generator = Generator(scripted.model(), state, scripted.settings(mode="ar", max_new_tokens=9))
    shown = [7]
    for event in generator.run([7]):
        if isinstance(event, BlockCommitted):
            assert event.start == len(shown)
            shown += event.tokens
            assert list(state.committed.tokens) == shown[:-1]
    assert len(shown) == 10


def test_controls_act_as_in_a_block(scripted: Scripted) -> None:
    """A frequency penalty forbids the third 5, then a second 0: each token counts at once."""
    settings = scripted.settings(mode="ar", max_new_tokens=4, frequency_penalty=2.0)
    model = scripted.model(answer=lambda p: 5, confidence=lambda p: 0.5)  # logit ln 48 = 3.87
    assert generate(model, scripted.state(), settings, [5, 5, 5]).token_ids == (5, 5, 0, 1)


def test_modes_can_follow_each_other_at_any_boundary(scripted: Scripted) -> None:
    """ar leaves a pending token; denoise commits it first, and its block goes on from there."""
    model, state = scripted.model(), scripted.state()
    run = Run(model, state, scripted.settings(max_new_tokens=100), prompt_tokens=2)
    run.commit_prompt([0, 1], logits=True)
    for _ in range(3):
        list(Autoregressive().block(run))
    list(Denoise().block(run))
    assert [token.token for token in run.tokens] == [(2 + i) % 40 for i in range(35)]
    assert [token.mode for token in run.tokens] == ["ar"] * 3 + ["denoise"] * 32
    assert list(state.committed.tokens) == [0, 1, *(token.token for token in run.tokens)]
    assert run.pending is None
