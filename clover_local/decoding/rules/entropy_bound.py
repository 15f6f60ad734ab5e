"""The `entropy_bound` rule: rows whose entropies together stay small.

H. Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded
unmasking" (2025): the error of fixing rows at once is at most the sum of their entropies but the
largest one.
"""

import torch

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident, refuse_nan

ENTROPY_BOUND = "entropy_bound"


def entropy_bound(rows: RowStatistics, *, gamma: float) -> Accept:
    """Rows by rising entropy while the sum of the first k without their largest is <= `gamma`.

    The first row always qualifies: alone it costs nothing.

    Args:
        rows: statistics of the masked rows, at least one.
        gamma: nats; compared in float32, as entropies are.

    Raises:
        ValueError: an entropy that is NaN.
    """
    refuse_nan(rows.entropy, "entropy")
    # Equal entropies: the more confident row first, then the lower one.
    order = rows.confidence.sort(descending=True, stable=True).indices
    order = order[rows.entropy[order].sort(stable=True).indices]
    # Entropies rise, so the largest of the first k is the k-th: the others are those before it.
    before = torch.zeros(len(order), dtype=torch.float64)
    before[1:] = rows.entropy[order[:-1]].double().cumsum(0)
    accept = torch.zeros_like(rows.entropy, dtype=torch.bool)
    accept[order] = before.float() <= torch.tensor(gamma, dtype=torch.float32)
    return or_most_confident(rows, accept, reason=ENTROPY_BOUND)
