"""The `sequential` rule: from left to right, so many rows a pass."""

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident

SEQUENTIAL = "sequential"


def sequential(rows: RowStatistics, *, k: int) -> Accept:
    """The leftmost `k` masked rows, at least one.

    Args:
        rows: statistics of the masked rows, ascending, at least one.
        k: how many.
    """
    accept = torch.arange(len(rows.confidence)) < max(k, 1)
    return or_most_confident(rows, accept, reason=SEQUENTIAL)
