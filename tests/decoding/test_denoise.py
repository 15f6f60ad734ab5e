"""`denoise` on a scripted model: passes, emission, limits, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from clover_local.decoding.events import BlockCommitted, Finished, PassDone
from clover_local.decoding.keys import SAMPLERS
from clover_local.decoding.repetition.deferral import OTHER_TOKEN
from clover_local.errors import SettingsError
from clover_local.generate import Generator, generate

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

MASK, STOP, PAD = 49, 48, 47


def test_rows_above_the_threshold_go_first_then_one_a_pass(scripted: Scripted) -> None:
    """Rows 3, 4 and 9 are sure, the others rise to the right."""
    model = scripted.model(confidence=lambda p: 0.97 if p - 2 in (3, 4, 9) else 0.5 + (p - 2) / 100)
    result = generate(model, scripted.state(), scripted.settings(max_new_tokens=32), [7, 8])
    passes = result.blocks[0].passes
    assert [fixed.row for fixed in passes[0]] == [3, 4, 9]
    others = [row for row in range(32) if row not in (3, 4, 9)]
    assert [[fixed.row for fixed in rows] for rows in passes[1:]] == [[r] for r in others[::-1]]
    assert result.token_ids == tuple((2 + row) % 40 for row in range(32))
    assert [token.pass_number for token in result.tokens][3:5] == [0, 0]
    assert result.tokens[31].pass_number == 1
    assert model.previews[1][3] == 5 and model.previews[1][5] == MASK


def test_lowest_row_wins_a_tie_of_confidence(scripted: Scripted) -> None:
    model = scripted.model(confidence=lambda p: 0.5)
    events = Generator(model, scripted.state(), scripted.settings(max_new_tokens=1)).run([1])
    fixed = [event.fixed for event in events if isinstance(event, PassDone)]
    assert [[row.row for row in rows] for rows in fixed] == [[row] for row in range(32)]


def test_stop_token_ends_the_answer_and_the_tail_is_never_committed(
    scripted: Scripted, stop_row: int
) -> None:
    model = scripted.model(answer=lambda p: STOP if p == 3 + stop_row else 5)
    state = scripted.state()
    result = generate(model, state, scripted.settings(), [1, 2, 3])
    assert result.finish_reason == "stop"
    assert result.token_ids == (*[5] * stop_row, STOP)
    assert result.text_ids == (5,) * stop_row
    assert model.commits == [[1, 2, 3], [*[5] * stop_row, STOP]]
    assert list(state.committed.tokens) == [1, 2, 3, *[5] * stop_row, STOP]


def test_stop_is_looked_for_only_when_the_block_is_resolved(scripted: Scripted) -> None:
    """The stop token is fixed in the first pass; rows to its left come later and are kept."""
    model = scripted.model(
        answer=lambda p: {1 + 6: STOP, 1 + 4: PAD}.get(p, 5),
        confidence=lambda p: 0.99 if p >= 7 else 0.6,
    )
    result = generate(model, scripted.state(), scripted.settings(), [1])
    assert len(result.blocks[0].passes) == 7
    assert result.token_ids == (5, 5, 5, 5, PAD)


@pytest.mark.parametrize("limit", [1, 31, 32, 33, 64, 65])
def test_max_new_tokens_cuts_the_last_block_not_its_rows(scripted: Scripted, limit: int) -> None:
    model, state = scripted.model(), scripted.state()
    result = generate(model, state, scripted.settings(max_new_tokens=limit), [0, 1, 2])
    assert result.finish_reason == "length"
    assert result.token_ids == tuple((3 + i) % 40 for i in range(limit))
    assert {len(block) for block in model.previews} == {32}
    assert [len(block.tokens) for block in result.blocks] == [
        min(32, limit - start) for start in range(0, limit, 32)
    ]
    assert state.length == 3 + limit


def test_stop_beyond_the_limit_is_not_reached(scripted: Scripted) -> None:
    model = scripted.model(answer=lambda p: STOP if p == 1 + 10 else 5)
    result = generate(model, scripted.state(), scripted.settings(max_new_tokens=10), [1])
    assert (result.finish_reason, len(result.tokens)) == ("length", 10)
    result = generate(model, scripted.state(), scripted.settings(max_new_tokens=11), [1])
    assert (result.finish_reason, len(result.tokens)) == ("stop", 11)


def test_block_at_the_context_end_has_only_the_rows_that_are_left(scripted: Scripted) -> None:
    model, state = scripted.model(), scripted.state(context=3 + 32 + 7)
    result = generate(model, state, scripted.settings(), [0, 1, 2])
    assert result.finish_reason == "context"
    assert [len(block) for block in model.previews] == [32, 7]
    assert len(result.tokens) == 39
    assert state.room == 0


def test_answer_that_ends_with_the_context_by_itself_says_stop_or_length(
    scripted: Scripted,
) -> None:
    model = scripted.model(answer=lambda p: STOP if p == 9 else 5)
    assert generate(model, scripted.state(10), scripted.settings(), [1]).finish_reason == "stop"
    settings = scripted.settings(max_new_tokens=9)
    assert generate(scripted.model(), scripted.state(10), settings, [1]).finish_reason == "length"


def test_tokens_are_committed_before_they_are_shown(scripted: Scripted) -> None:
    state = scripted.state()
    generator = Generator(scripted.model(), state, scripted.settings(max_new_tokens=70))
    shown = [4, 4]
    for event in generator.run([4, 4]):
        if isinstance(event, BlockCommitted):
            assert event.start == len(shown)
            shown += event.tokens
            assert list(state.committed.tokens) == shown
    assert len(shown) == 72


def test_thinking_bias_ends_when_its_token_is_visible_in_the_block(scripted: Scripted) -> None:
    """The bias turns row 0 into the end of thinking; with that visible, no other row follows."""
    settings = scripted.settings(
        max_new_tokens=32,
        think_end_token_id=46,
        think_end_bias=2.0,
        think_end_start=-1,
        think_end_window=1,
    )
    model = scripted.model(confidence=lambda p: 0.10 - p / 1000)  # softmax of 46: about 0.12
    assert generate(model, scripted.state(), settings, [0]).token_ids.count(46) == 1


def test_history_of_earlier_blocks_acts_on_the_next(scripted: Scripted) -> None:
    """Token 5 fills the first block; its count then makes any other token likelier."""
    settings = scripted.settings(max_new_tokens=40, frequency_penalty=1.0)
    result = generate(scripted.model(answer=lambda p: 5), scripted.state(), settings, [5, 5])
    assert set(result.token_ids[:32]) == {5}
    assert 5 not in result.token_ids[32:]


@pytest.mark.parametrize("mode", ["denoise", "ar"])
def test_bias_counts_positions_from_one_over_all_blocks(scripted: Scripted, mode: str) -> None:
    """The length bias begins at response position 36: row 3 of the second block."""
    settings = scripted.settings(
        mode=mode,
        stop_ids=(STOP,),
        length_penalty=90.0,
        length_penalty_start=35,
        length_penalty_window=1,
    )
    result = generate(scripted.model(), scripted.state(), settings, [1, 2, 3])
    assert (len(result.tokens), result.token_ids[-1]) == (36, STOP)


def test_counts_and_statistics_of_a_run(scripted: Scripted) -> None:
    model = scripted.model(confidence=lambda p: 0.99 if p % 2 else 0.9)
    result = generate(model, scripted.state(), scripted.settings(max_new_tokens=33), [0])
    stats = result.stats
    assert (stats.previews, stats.commits, stats.forwards) == (34, 2, 36)
    assert stats.tokens_per_forward == 33 / 36
    assert stats.tokens_per_preview == 33 / 34
    assert stats.distinct_experts_per_layer == 2.5
    assert stats.ms_per_preview is not None and stats.ms_per_preview > 0
    assert set(model.logits_asked) == {"none"}  # no row of the head is computed in vain


def test_same_seed_same_text_and_another_seed_another(scripted: Scripted) -> None:
    def text(**given: Any) -> tuple[int, ...]:
        settings = scripted.settings(max_new_tokens=50, **given)
        model = scripted.model(confidence=lambda p: 0.3)
        return generate(model, scripted.state(), settings, [3]).token_ids

    assert text(temperature=1.0, seed=4) == text(temperature=1.0, seed=4)
    assert text(temperature=1.0, seed=4) != text(temperature=1.0, seed=5)
    assert text(temperature=1.0, top_k=1) == text() == text(temperature=0.0, seed=5)


def test_causal_only_checkpoint_refuses_to_denoise(scripted: Scripted) -> None:
    model = scripted.model(can_preview=False)
    with pytest.raises(SettingsError, match="--mode ar"):
        generate(model, scripted.state(), scripted.settings(), [1])
    settings = scripted.settings(mode="ar", max_new_tokens=3)
    assert len(generate(model, scripted.state(), settings, [1]).tokens) == 3


def test_last_event_carries_the_result(scripted: Scripted) -> None:
    generator = Generator(scripted.model(), scripted.state(), scripted.settings(max_new_tokens=2))
    *_, last = generator.run([1])
    assert isinstance(last, Finished)
    assert last.result is generator.result


def test_equal_neighbours_wait_for_each_other_and_the_block_ends(scripted: Scripted) -> None:
    """Each row wants what its left neighbour has, until it sees it: then the next token."""

    def seen(logits: Tensor, start: int) -> None:
        block = model.previews[-1] if model.previews else []
        for row in range(1, len(block) if len(logits) > 1 else 0):
            token = int(logits[row].argmax())
            if token in (block[row - 1], *block[row + 1 : row + 2]):
                logits[row].zero_()[token + 20] = 9.0

    model = scripted.model(answer=lambda p: p // 2, rewrite=seen)
    settings = scripted.settings(max_new_tokens=32)
    off = generate(model, scripted.state(), settings, [0]).token_ids
    assert any(a == b for a, b in pairwise(off))
    on = generate(
        model, scripted.state(), replace(settings, in_block_repetition=True), [0]
    ).token_ids
    assert len(on) == 32 and not any(a == b for a, b in pairwise(on))


def test_with_eos_order_rows_behind_a_stop_token_are_not_computed(scripted: Scripted) -> None:
    """The stop token is the surest from the start, and what follows it never is sure."""
    model = scripted.model(
        answer=lambda p: STOP if p == 1 + 6 else 5, confidence=lambda p: 0.99 if p == 7 else 0.5
    )
    off = generate(model, scripted.state(), scripted.settings(), [1])
    on = generate(model, scripted.state(), scripted.settings(eos_order=True), [1])
    assert on.token_ids == off.token_ids == (*[5] * 6, STOP)
    order = [fixed.row for rows in on.blocks[0].passes for fixed in rows]
    assert order == [*range(7)]
    assert (len(off.blocks[0].passes), len(on.blocks[0].passes)) == (32, 7)


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
def test_no_stop_token_below_the_least_length(mode: str, scripted: Scripted) -> None:
    model = scripted.model(answer=lambda p: STOP if p > 3 else 5)
    settings = scripted.settings(mode=mode, max_new_tokens=60, min_new_tokens=40)
    result = generate(model, scripted.state(), settings, [1])
    assert (len(result.tokens), result.token_ids[-1], result.finish_reason) == (40, STOP, "stop")
    assert not {STOP, PAD} & {*result.token_ids[:-1]}


def test_draft_exact_writes_as_ar_under_controls_of_ours(scripted: Scripted) -> None:
    given = {"max_new_tokens": 60, "min_new_tokens": 50, "dry_multiplier": 3.0, "accept": "exact"}
    model = scripted.model(answer=lambda p: p % 6 if p < 45 else STOP, confidence=lambda p: 0.9)
    texts = [
        generate(model, scripted.state(), scripted.settings(mode=mode, **given), [1]).token_ids
        for mode in ("ar", "draft")
    ]
    assert texts[0] == texts[1] and len(texts[0]) >= 50


@pytest.mark.parametrize(
    "cut",
    [{"top_p": 0.01}, {"top_k": 1}, {"top_p": 0.01, "top_k": 1, "temperature": 50.0}],
    ids=str,
)
def test_a_cut_that_leaves_one_token_makes_no_row_sure(
    cut: dict[str, Any], scripted: Scripted
) -> None:
    """Each row's token is certain to be drawn, and still has the model's 0.3: one row a pass."""
    settings = scripted.settings(max_new_tokens=40, **{"temperature": 0.8, **cut})
    result = generate(scripted.model(confidence=lambda p: 0.3), scripted.state(), settings, [3])
    assert [len(rows) for block in result.blocks for rows in block.passes] == [1] * 64
    assert [token.confidence for token in result.tokens] == pytest.approx([0.3] * 40)
    greedy = generate(
        scripted.model(confidence=lambda p: 0.3),
        scripted.state(),
        scripted.settings(max_new_tokens=40),
        [3],
    )
    assert result.tokens == greedy.tokens and result.blocks == greedy.blocks


@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_neighbours_are_equal_whatever_the_rule_of_a_model_that_wants_nothing_else(
    sampler: str, drawn: dict[str, Any], scripted: Scripted
) -> None:
    """Every row of every block wants 5 for ever, or every second pair of rows the same token."""
    given = {"max_new_tokens": 80, "sampler": sampler, "suppress": (STOP, PAD), **drawn}
    for answer in (lambda p: 5, lambda p: p // 2 % 40):
        settings = scripted.settings(**given, in_block_repetition=True)
        model = scripted.model(answer=answer, confidence=lambda p: 0.99 - p % 7 / 50)
        result = generate(model, scripted.state(), settings, [0])
        assert len(result.tokens) == 80 and result.finish_reason == "length"
        assert not any(a == b for a, b in pairwise(result.token_ids))
        assert all(len(block.passes) <= 32 for block in result.blocks)


def test_a_token_that_stands_in_for_a_repeat_has_its_own_confidence_and_reason(
    scripted: Scripted,
) -> None:
    records: list[dict[str, Any]] = []

    class Sink:
        model, model_hash = "", ""

        def write(self, record: Mapping[str, object]) -> None:
            records.append(dict(record))

    settings = scripted.settings(max_new_tokens=32, in_block_repetition=True)
    model = scripted.model(answer=lambda p: 5, confidence=lambda p: 0.97)
    result = generate(model, scripted.state(), settings, [0], trace=Sink())
    fixed = [row for record in records if record["record"] == "pass" for row in record["fixed"]]
    instead = [row for row in fixed if row["reason"] == OTHER_TOKEN]
    assert len(instead) == 16 and all(row["token"] != 5 for row in instead)
    for row in instead:
        assert [row["token"], row["confidence"]] in row["top"]
        assert result.tokens[row["row"]].confidence == row["confidence"] < 0.01
