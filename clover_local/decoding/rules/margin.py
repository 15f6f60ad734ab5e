"""The `margin` rule: rows whose token is far ahead of the next likely one."""

import torch
from torch import Tensor

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident, refuse_nan

MARGIN = "margin"


def margin(rows: RowStatistics, *, margin: float) -> Accept:
    """Rows with p1 - p2 strictly above `margin`.

    Args:
        rows: statistics of the masked rows, at least one.
        margin: compared in float32, as the probabilities are.

    Raises:
        ValueError: a probability that is NaN.
    """
    ahead = rows.confidence - best_other(rows)
    refuse_nan(ahead, "margin")
    return or_most_confident(rows, ahead > torch.tensor(margin, dtype=torch.float32), reason=MARGIN)


def best_other(rows: RowStatistics) -> Tensor:
    """[n]: the largest probability of a token that is not the row's own; 0 where there is none."""
    others = rows.top_probabilities.masked_fill(rows.top_ids == rows.token[:, None], 0)
    return others.amax(-1)
