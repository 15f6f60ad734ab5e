"""Response controls on hand-made tables."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.settings import Settings

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
