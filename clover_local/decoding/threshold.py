"""The `threshold` rule: accept rows with a confidence strictly above it; else the best one.

An unmasking rule is a pure function of the masked rows' statistics; it sees no logits and holds no
state.
"""

import torch

from clover_local.decoding.pick import Accept, RowStatistics

ABOVE = "above_threshold"
MOST_CONFIDENT = "most_confident"


def threshold(rows: RowStatistics, *, threshold: float) -> Accept:
    """Rows above `threshold`; if there is none, the most confident row (the lowest on a tie).

    Args:
        rows: statistics of the masked rows, at least one.
        threshold: compared in float32, as the confidence is.
    """
    accept = rows.confidence > torch.tensor(threshold, dtype=torch.float32)
    reason = ABOVE
    if not bool(accept.any()):
        accept = torch.zeros_like(accept)
        accept[int(rows.confidence.argmax())] = True  # argmax gives the first of equals
        reason = MOST_CONFIDENT
    return Accept(accept, tuple(reason if taken else "" for taken in accept.tolist()))
