"""The `klass` rule: rows that are sure and whose distribution has come to rest.

S. H. Kim et al., "KLASS: KL-guided fast inference in masked diffusion models" (2025). It needs
every row's distribution of the pass before, which stays where the logits are (`Stillness`).
"""

import torch
from torch import Tensor

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident

KLASS = "klass"


def klass(rows: RowStatistics, *, threshold: float, history: int) -> Accept:
    """Rows above `threshold` that were still in each of the last `history` passes.

    Args:
        rows: statistics of the masked rows, at least one, with `still_passes`.
        threshold: compared in float32, as the confidence is.
        history: passes.

    Raises:
        ValueError: statistics without `still_passes`.
    """
    if rows.still_passes is None:
        raise ValueError("klass needs rows with still_passes, and these have none")
    sure = rows.confidence > torch.tensor(threshold, dtype=torch.float32)
    return or_most_confident(rows, sure & (rows.still_passes >= history), reason=KLASS)


class Stillness:
    """For each row of a block: passes in a row, up to now, whose KL(p_t, p_t-1) was below `kl`."""

    def __init__(self, *, kl: float) -> None:
        """Of one block that begins."""
        self._kl = kl
        self._before: dict[int, Tensor] = {}  # row of the block: its distribution [V]
        self._still: dict[int, int] = {}

    def follow(self, probabilities: Tensor, places: list[int]) -> Tensor:
        """[n] int64, after a pass that gave the masked rows at `places` these distributions.

        Args:
            probabilities: [n, V]; its rows are kept.
            places: the rows' places in the block.
        """
        known = [i for i, place in enumerate(places) if place in self._before]
        moved = dict[int, float]()
        if known:
            before = torch.stack([self._before[places[i]] for i in known])
            moved = dict(zip(known, divergence(probabilities[known], before).tolist(), strict=True))
        still = dict[int, int]()
        for i, place in enumerate(places):
            if moved.get(i, torch.inf) < self._kl:
                still[place] = self._still[place] + 1
            else:
                still[place] = 0
        self._still = still
        self._before = dict(zip(places, probabilities.unbind(), strict=True))
        return torch.tensor([still[place] for place in places])


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) in nats of each row of two [n, V] tables, at least 0; 0 log 0 is 0."""
    terms = torch.xlogy(p, p).sub_(torch.xlogy(p, q))
    return terms.sum(-1).clamp_min(0)  # rounding could make it less
