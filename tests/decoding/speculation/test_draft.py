"""`draft` on scripted models: widths, ends, interrupts, and the distribution that it keeps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.decoding.autoregressive import Autoregressive
from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.denoise import Denoise
from clover_local.decoding.events import BlockCommitted, PassDone
from clover_local.decoding.run import Run
from clover_local.decoding.settings import Settings
from clover_local.decoding.speculation.draft import Draft, fitting_width
from clover_local.generate import Generator, generate
from tests.decoding.conftest import (
    CPU,
    PlainModel,
    Scripted,
    ScriptedOutput,
    ScriptedVerify,
    advance,
    verified,
)

STOP, MASK = 48, 49


@pytest.mark.parametrize(
    ("width", "room", "fits"),
    [(16, 99, 16), (16, 16, 16), (16, 15, 8), (16, 7, 4), (16, 1, 1), (32, 3, 2), (1, 5, 1)],
)
def test_a_width_is_halved_until_it_fits(width: int, room: int, fits: int) -> None:
    assert fitting_width(width, room=room) == fits


def test_a_preview_and_a_verify_a_round_and_nothing_twice(scripted: Scripted) -> None:
    """The scripted model previews what it commits, so every draft is accepted."""
    model, state = scripted.model(), scripted.state()
    settings = scripted.settings(mode="draft", max_new_tokens=33)
    result = generate(model, state, settings, [0, 1, 2])
    assert result.token_ids == tuple((3 + i) % 40 for i in range(33))
    assert model.commits == [[0, 1, 2]]
    assert model.previews == [[3, *[MASK] * 15], [19, *[MASK] * 15]]
    assert model.verifies == [[*range(3, 19)], [*range(19, 35)]]
    assert [(r.width, r.accepted, r.boundary) for r in result.rounds] == [
        (16, 15, 19),
        (16, 15, 35),
    ]
    assert list(state.committed.tokens) == [*range(35)]
    assert (result.finish_reason, result.mode, result.blocks) == ("length", "draft", ())
    stats, told = result.stats, result.of_rounds
    assert (stats.previews, stats.commits, stats.forwards) == (2, 2, 4)
    assert told is not None
    assert (told.rounds, told.tokens_per_round, told.drafts_per_round) == (2, 16, 15)
    assert {token.mode for token in result.tokens} == {"draft"}


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 20, 40])
@pytest.mark.parametrize("width", [1, 2, 16, 32])
def test_exactly_as_many_tokens_as_allowed(scripted: Scripted, limit: int, width: int) -> None:
    model = scripted.model()
    settings = scripted.settings(mode="draft", max_new_tokens=limit, draft_width=width)
    result = generate(model, scripted.state(), settings, [0, 1, 2])
    assert result.token_ids == tuple((3 + i) % 40 for i in range(limit))
    assert result.finish_reason == "length"
    if width == 1:
        assert model.previews == []


@pytest.mark.parametrize("room", [1, 2, 5, 17, 18, 30])
def test_the_context_is_filled_as_by_ar(scripted: Scripted, room: int) -> None:
    results = []
    for mode in ("ar", "draft"):
        state = scripted.state(context=3 + room)
        results.append(generate(scripted.model(), state, scripted.settings(mode=mode), [0, 1, 2]))
    ours, theirs = results
    assert ours.token_ids == theirs.token_ids
    assert ours.finish_reason == theirs.finish_reason == "context"
    assert len(ours.tokens) == room


@pytest.mark.parametrize("place", [3, 4, 9, 18, 19, 20, 35])
def test_the_first_stop_token_ends_the_run_and_nothing_behind_it_is_kept(
    scripted: Scripted, place: int
) -> None:
    """As the very first pick, among the drafts, and as the boundary."""
    model = scripted.model(answer=lambda p: STOP if p >= place else p % 40)
    state = scripted.state()
    result = generate(model, state, scripted.settings(mode="draft"), [0, 1, 2])
    assert result.token_ids == (*range(3, place), STOP)
    assert result.finish_reason == "stop"
    assert list(state.committed.tokens) == [*range(place)]


def test_events_show_the_drafts_and_then_what_was_emitted(scripted: Scripted) -> None:
    settings = scripted.settings(mode="draft", max_new_tokens=17)
    generator = Generator(scripted.model(), scripted.state(), settings)
    events = list(generator.run([0, 1, 2]))
    (drafted,) = (event for event in events if isinstance(event, PassDone))
    assert (drafted.start, drafted.tokens) == (4, tuple(range(4, 19)))
    assert [fixed.row for fixed in drafted.fixed] == [*range(15)]
    emitted = [event for event in events if isinstance(event, BlockCommitted)]
    assert [(event.start, event.tokens) for event in emitted] == [
        (3, (3,)),
        (4, tuple(range(4, 20))),
    ]


def test_modes_can_follow_each_other_at_any_boundary(scripted: Scripted) -> None:
    model, state = scripted.model(), scripted.state()
    run = Run(model, state, scripted.settings(max_new_tokens=300), prompt_tokens=2)
    run.commit_prompt([0, 1], logits=True)
    for mode in (Draft(), Draft(), Autoregressive(), Draft(), Denoise()):
        list(mode.block(run))
    assert [token.token for token in run.tokens] == [(2 + i) % 40 for i in range(66)]
    counts = Counter(token.mode for token in run.tokens)
    assert counts == {"draft": 33, "ar": 1, "denoise": 32}
    assert list(state.committed.tokens) == [0, 1, *(token.token for token in run.tokens)]


VOCABULARY = 5


@dataclass
class Markov(PlainModel):
    """Each token's logits depend on the token before it; previews propose what is often wrong."""

    config: ModelConfig
    can_preview: bool = True
    device: torch.device = CPU

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)

    def commit(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        kind: Literal["commit", "prompt"] = "commit",
    ) -> ScriptedOutput:
        advance(state, tokens)
        return self._output([tokens[-1]])

    def preview(self, block: Sequence[int], state: SequenceState) -> ScriptedOutput:
        return self._output([(block[0] + row) % VOCABULARY for row in range(len(block))])

    def verify(self, tokens: Sequence[int], state: SequenceState) -> ScriptedVerify:
        return verified(self.table[list(tokens)], tokens, state)

    def _output(self, after: Sequence[int]) -> ScriptedOutput:
        return ScriptedOutput(self.table[list(after)], distinct_experts=torch.zeros(()))


def test_at_a_temperature_whole_answers_are_as_likely_as_in_ar(golden_config: ModelConfig) -> None:
    """Chi-square of 3,000 answers of three tokens, under a penalty, against every probability."""
    config = replace(golden_config, vocab_size=VOCABULARY, mask_token_id=VOCABULARY - 1)
    model = Markov(config)
    settings = Settings(
        mask_token_id=VOCABULARY - 1,
        vocab_size=VOCABULARY,
        mode="draft",
        accept="exact",
        draft_width=2,
        max_new_tokens=3,
        temperature=0.9,
        presence_penalty=0.6,
    )
    runs, seen, accepted = 3000, Counter[tuple[int, ...]](), 0
    for seed in range(runs):
        state = SequenceState(config, context=9, device="cpu", dtype=torch.float32)
        result = generate(model, state, replace(settings, seed=seed), [1])
        seen[result.token_ids] += 1
        accepted += sum(each.accepted for each in result.rounds)
    assert 0.05 * runs < accepted < 0.95 * runs  # both branches are taken
    difference = 0.0
    answers = list(itertools.product(range(VOCABULARY - 1), repeat=3))
    for answer in answers:
        probability, controls, before = 1.0, ResponseControls(settings), 1
        for token in answer:
            acting = controls.along([])
            row = acting.apply(acting.ban(model.table[before : before + 1].clone()))[0]
            probability *= float((row.double() / 0.9).softmax(-1)[token])
            controls.add([token])
            before = token
        difference += (seen[answer] - runs * probability) ** 2 / (runs * probability)
    assert difference < 115  # 63 degrees of freedom: 1 in 15,000
