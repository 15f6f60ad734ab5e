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
