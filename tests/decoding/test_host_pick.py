"""The pick on the host is `pick` with the controls of each row's own position, then the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.pick import DeviceBlock
from clover_local.decoding.rules.threshold import ABOVE

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

MASK, STOP, THINK_END, VOCABULARY = 49, 48, 7, 50


def test_rows_stand_behind_the_response(scripted: Scripted) -> None:
    """Three tokens are out, so the bias that begins at position 6 begins in row 2."""
    settings = scripted.settings(
        stop_ids=(STOP,), length_penalty=9.0, length_penalty_start=5, length_penalty_window=1
    )
    controls = ResponseControls(settings)
    controls.add([1, 1, 1])
    statistics = HostPicker().pick(torch.zeros(4, VOCABULARY), controls, rows=[0, 1, 2, 3])
    assert statistics.token.tolist() == [0, 0, STOP, STOP]


def test_what_the_block_shows_counts_and_only_masked_rows_are_picked(scripted: Scripted) -> None:
    settings = scripted.settings(
        think_end_token_id=THINK_END, think_end_bias=9.0, think_end_start=-1, think_end_window=1
    )
    logits = torch.zeros(3, VOCABULARY)
    logits[2, 5] = 9.0
    block = DeviceBlock(torch.tensor([MASK, THINK_END, MASK]), [MASK, THINK_END, MASK])
    statistics, accepted = HostPicker().pick_block(
        logits,
        ResponseControls(settings),
        block=block.host,
        rows=[0, 2],
        on_device=block,
        pass_number=0,
    )
    assert statistics.token.tolist() == [0, 5]
    assert accepted.reasons == ("", ABOVE)
    assert block.ids.tolist() == [MASK, THINK_END, MASK]


def test_credit_makes_a_row_as_sure_without_a_control_of_ours_as_with_it(
    scripted: Scripted,
) -> None:
    """A stop token that leads is banned by `min_new_tokens`; the credit of the next one stays."""
    settings = scripted.settings(sampler="credit", min_new_tokens=9, sampler_alpha=3.0)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, STOP], logits[0, 5] = 1.0, 4.0
    picker, controls = HostPicker(), ResponseControls(settings)
    for number in range(2):
        got, _ = picker.pick_block(
            logits, controls, block=[MASK], rows=[0], on_device=None, pass_number=number
        )
    gain, banned = float(logits[0, :MASK].softmax(0)[5]), [STOP, 47]
    raw = logits[0].clone()
    raw[MASK] = -torch.inf
    first = raw.index_fill(0, torch.tensor(banned), -torch.inf).softmax(0)[5] ** 0.2
    raw[5] += 3.0 * torch.log1p(1.8 * first)
    controlled = raw.index_fill(0, torch.tensor(banned), -torch.inf)
    torch.testing.assert_close(got.raw_confidence, raw.softmax(0)[5:6])
    torch.testing.assert_close(got.confidence, controlled.softmax(0)[5:6])
    assert got.raw_confidence > gain
