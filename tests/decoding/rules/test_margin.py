"""p1 - p2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.margin import MARGIN, best_other, margin


def test_rows_far_ahead_of_the_next_token(table: Callable[..., RowStatistics]) -> None:
    made = table(0.95, 0.95, 0.6, second=[0.02, 0.05, 0.1])
    assert margin(made, margin=0.9).reasons == (MARGIN, "", "")
    assert margin(made, margin=0.4).accept.all()


def test_equal_to_the_margin_is_not_above_it(table: Callable[..., RowStatistics]) -> None:
    made = table(0.75, 0.8, second=[0.25, 0.1])
    assert margin(made, margin=0.5).accept.tolist() == [False, True]


def test_a_drawn_token_that_does_not_lead_is_behind(table: Callable[..., RowStatistics]) -> None:
    """The token 7 was drawn with probability 0.1; the likeliest has 0.6."""
    made = replace(table(0.1, second=[0.0]), token=torch.tensor([7]))
    made = replace(made, top_probabilities=torch.tensor([[0.6, 0.2]]))
    assert best_other(made).tolist() == torch.tensor([0.6]).tolist()
