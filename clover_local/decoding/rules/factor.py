"""The `factor` rule: as many of the surest rows as their least sure one allows.

C. Wu et al., "Fast-dLLM" (2025), section 3.3: n rows at once give the same tokens as one after the
other while (n + 1)(1 - c_n) < f, so sure rows go together and unsure ones alone.
"""

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import falling, or_most_confident

FACTOR = "factor"


def factor(rows: RowStatistics, *, factor: float) -> Accept:
    """The n most confident rows, for the largest n with (n + 1)(1 - c_n) < `factor`.

    Args:
        rows: statistics of the masked rows, at least one.
        factor: 1 is the paper's bound; more is bolder.
    """
    order = falling(rows.confidence)
    n = torch.arange(1, len(order) + 1)
    holds = (n + 1) * (1 - rows.confidence[order].double()) < factor
    largest = int((holds * n).max()) if len(n) else 0
    accept = torch.zeros_like(rows.confidence, dtype=torch.bool)
    accept[order[:largest]] = True
    return or_most_confident(rows, accept, reason=FACTOR)
