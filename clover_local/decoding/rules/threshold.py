"""The `threshold` rule: accept rows with a confidence strictly above it; else the best one.

An unmasking rule is a pure function of the masked rows' statistics; it sees no logits and holds no
state.
"""

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident

ABOVE = "above_threshold"


def threshold(rows: RowStatistics, *, threshold: float) -> Accept:
    """Rows above `threshold`.

    Args:
        rows: statistics of the masked rows, at least one.
        threshold: compared in float32, as the confidence is.
    """
    above = rows.confidence > torch.tensor(threshold, dtype=torch.float32)
    return or_most_confident(rows, above, reason=ABOVE)
