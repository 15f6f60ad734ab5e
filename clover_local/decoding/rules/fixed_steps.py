"""The `fixed_steps` rule: a block takes so many passes, however sure the model is."""

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import falling, or_most_confident

FIXED_STEPS = "fixed_steps"


def fixed_steps(rows: RowStatistics, *, steps_left: int) -> Accept:
    """The most confident ceil(n / `steps_left`) of n masked rows.

    Args:
        rows: statistics of the masked rows, at least one.
        steps_left: passes that may still be made, this one included; below 1 counts as 1.
    """
    count = -(-len(rows.confidence) // max(steps_left, 1))
    accept = torch.zeros_like(rows.confidence, dtype=torch.bool)
    accept[falling(rows.confidence)[:count]] = True
    return or_most_confident(rows, accept, reason=FIXED_STEPS)
