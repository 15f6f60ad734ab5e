"""Response controls on hand-made tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.settings import Settings

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

MASK, VOCABULARY = 11, 12


def controls(response: list[int], **settings: Any) -> ResponseControls:
    made = ResponseControls(Settings(mask_token_id=MASK, vocab_size=VOCABULARY, **settings))
    made.add(response)
    return made


def applied(made: ResponseControls, logits: list[float], n: int, visible: list[int]) -> list[float]:
    """One row at response position `n`, after bans and controls."""
    acting = made.at([n], visible=visible)
    row: list[float] = acting.apply(acting.ban(torch.tensor([logits])))[0].tolist()
    return row


def flat(value: float = 1.0) -> list[float]:
    return [value] * VOCABULARY


def test_mask_and_suppressed_ids_are_banned() -> None:
    row = applied(controls([], suppress_tokens=(3,), suppress=(5, 3)), flat(), 1, [])
    assert [i for i, value in enumerate(row) if value == -math.inf] == [3, 5, MASK]


def test_presence_counts_a_token_once_and_frequency_every_time() -> None:
    row = applied(
        controls([4, 2, 4, 4], presence_penalty=0.5, frequency_penalty=0.25), flat(), 5, []
    )
    assert row[4] == 1 - 3 * 0.25 - 0.5
    assert row[2] == 1 - 0.25 - 0.5
    assert row[0] == 1


def test_repetition_comes_after_the_subtractions_and_looks_at_the_sign_then() -> None:
    made = controls([1, 2, 3], presence_penalty=1.0, repetition_penalty=2.0)
    row = applied(made, [0.0, 0.5, 3.0, 1.0, *flat()[4:]], 4, [])
    assert row[:4] == [0.0, -1.0, 1.0, 0.0]  # (0.5 - 1) * 2, (3 - 1) / 2, (1 - 1) / 2


def test_length_bias_is_added_once_to_each_distinct_stop_id() -> None:
    made = controls(
        [], stop_ids=(6, 7), length_penalty=6.0, length_penalty_start=40, length_penalty_window=24
    )
    positions = {40: 0.0, 41: 0.25, 52: 3.0, 64: 6.0, 9999: 6.0}
    for n, bias in positions.items():
        row = applied(made, flat(), n, [])
        assert (row[6], row[7], row[5]) == (1 + bias, 1 + bias, 1)


def test_length_bias_comes_after_repetition() -> None:
    made = controls(
        [6],
        stop_ids=(6,),
        repetition_penalty=2.0,
        length_penalty=1.0,
        length_penalty_start=0,
        length_penalty_window=1,
    )
    assert applied(made, flat(4.0), 2, [])[6] == 3.0  # 4 / 2 + 1


@pytest.mark.parametrize(
    "response, visible, bias",
    [([], [MASK, MASK], 2.0), ([9], [MASK], 0.0), ([1], [MASK, 9], 0.0), ([8], [8], 2.0)],
    ids=["open", "in-history", "visible-in-block", "other-tokens"],
)
def test_thinking_bias_acts_only_until_thinking_has_ended(
    response: list[int], visible: list[int], bias: float
) -> None:
    made = controls(
        response,
        think_end_token_id=9,
        think_end_bias=4.0,
        think_end_start=8,
        think_end_window=8,
    )
    assert applied(made, flat(), 12, visible)[9] == 1 + bias


def test_each_row_has_the_bias_of_its_own_position() -> None:
    made = controls(
        [], stop_ids=(0,), length_penalty=3.0, length_penalty_start=2, length_penalty_window=3
    )
    acting = made.at([1, 2, 3, 4, 5, 6])
    rows: Tensor = acting.apply(torch.zeros(6, VOCABULARY))
    assert rows[:, 0].tolist() == [0, 0, 1, 2, 3, 3]


def test_neutral_controls_change_nothing_but_bans() -> None:
    made = controls(
        [1, 2, 9], stop_ids=(1,), think_end_token_id=9, length_penalty_start=0, think_end_start=0
    )
    acting = made.at([4, 5])
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert not acting.act_on_response
    assert torch.equal(acting.apply(logits.clone()), logits)


def test_a_banned_stop_id_stays_banned_under_its_bias() -> None:
    made = controls(
        [3],
        suppress=(3,),
        stop_ids=(3,),
        repetition_penalty=1.3,
        length_penalty=5.0,
        length_penalty_start=0,
        length_penalty_window=1,
    )
    assert applied(made, flat(), 5, [])[3] == -math.inf


def test_counts_grow_token_by_token_as_all_at_once() -> None:
    """More distinct tokens than the first buffer holds."""
    tokens = [(7 * i * i) % 293 for i in range(500)]
    settings = Settings(mask_token_id=299, vocab_size=301, frequency_penalty=1.0)
    made = ResponseControls(settings)
    for start in range(0, 500, 3):
        made.add(tokens[start : start + 3])
    acting = made.at([501])
    counted = dict(zip(acting.seen.tolist(), acting.counts.tolist(), strict=True))
    assert len(counted) > 64
    assert counted == {token: tokens.count(token) for token in tokens}
    assert made.length == 500
    assert 7 in made and 300 not in made


def test_every_row_of_several_tokens_is_controlled_as_in_a_forward_of_its_own() -> None:
    """Counts, presence, positions and the thinking budget, over histories that grow row by row."""
    settings = Settings(
        mask_token_id=19,
        vocab_size=20,
        stop_ids=(17, 18),
        think_end_token_id=5,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        length_penalty=2.0,
        length_penalty_start=3,
        length_penalty_window=7,
        think_end_bias=3.0,
        think_end_start=2,
        think_end_window=5,
    )
    so_far, tokens = [3, 8, 3], [8, 1, 5, 1, 3, 1, 9]
    logits = torch.randn(len(tokens) + 1, 20, generator=torch.manual_seed(0))
    response = ResponseControls(settings)
    response.add(so_far)
    together = response.along(tokens)
    ours = together.apply(together.ban(logits.clone()))
    for row in range(len(logits)):
        alone = ResponseControls(settings)
        alone.add(so_far + tokens[:row])
        controls = alone.at([alone.length + 1])
        expected = controls.apply(controls.ban(logits[row : row + 1].clone()))
        assert torch.equal(ours[row : row + 1], expected)
    assert response.length == len(so_far)


def test_stop_tokens_are_banned_below_the_least_length(scripted: Scripted) -> None:
    controls = ResponseControls(scripted.settings(min_new_tokens=4))
    controls.add([1])
    acting = controls.at([2, 3, 4, 5])
    got = acting.apply(torch.zeros(4, 50))
    assert (got[:2, [47, 48]] == -torch.inf).all() and (got[2:] == 0).all()
    assert (got[:, :47] == 0).all()
    assert acting.describe()["stop_banned"] == [True, True, False, False]
    assert controls.at([4, 5]).stop_banned is None


def test_dry_costs_what_continues_a_repetition_in_every_kind_of_row(scripted: Scripted) -> None:
    """Along drafts each row costs what it would in a forward of its own."""
    settings = scripted.settings(dry_multiplier=3.0, dry_base=2.0, dry_allowed=2)
    controls = ResponseControls(settings)
    controls.add([1, 2, 3, 4, 1, 2])
    drafts = [3, 4, 9]
    along = controls.along(drafts).apply(torch.zeros(4, 50))
    for row in range(4):
        alone = ResponseControls(settings)
        alone.add([1, 2, 3, 4, 1, 2, *drafts[:row]])
        expected = alone.at([7 + row]).apply(torch.zeros(1, 50))
        assert torch.equal(along[row], expected[0])
    assert along[:3].min(1).values.tolist() == [-3.0, -6.0, -12.0]
    assert along[2, 1] == -12.0 and (along[3] == 0).all()


def test_dry_sees_the_block_on_both_sides(scripted: Scripted) -> None:
    controls = ResponseControls(scripted.settings(dry_multiplier=3.0))
    controls.add([1, 2, 3])
    block = [1, 49, 3, 49]
    got = controls.at([5, 7], visible=block).apply(torch.zeros(2, 50))
    assert got.nonzero().tolist() == [[0, 2]] and got[0, 2] == -3.0
    # In a round of drafts the block begins with the pending token, which is counted already.
    behind = ResponseControls(scripted.settings(dry_multiplier=3.0))
    behind.add([1, 2, 3, 1, 2])
    got = behind.at([6], visible=[2, 49], visible_from=4).apply(torch.zeros(1, 50))
    assert got.nonzero().tolist() == [[0, 3]]


def test_controls_of_ours_at_strength_zero_change_no_bit(scripted: Scripted) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    controls = ResponseControls(scripted.settings(dry_base=9.0, dry_allowed=1, min_new_tokens=0))
    controls.add([1, 2, 1, 2, 1])
    acting = controls.at([6, 7, 8], visible=[49, 49, 49])
    assert torch.equal(acting.apply(logits.clone()), logits)
    assert not acting.act_on_response


def test_other_settings_keep_what_is_counted(scripted: Scripted) -> None:
    controls = ResponseControls(scripted.settings())
    controls.add([1, 2, 3, 1])
    assert controls.ngrams == set() and controls.distinct == 0
    controls.use(scripted.settings(frequency_penalty=1.0, no_repeat_ngram=2))
    assert controls.ngrams == {(1, 2), (2, 3), (3, 1)} and controls.distinct == 3
    controls.add([5])
    assert (1, 5) in controls.ngrams and controls.length == 5
