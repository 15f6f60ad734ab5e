"""The `credit` rule: tokens that were likely in earlier passes get credit, then `threshold`.

K. Wang et al., "CreditDecoding" (2025): a token that leads pass after pass is accepted before it is
sure in any single one. The credit of each row and token stays where the logits are.
"""

import torch
from torch import Tensor


class Credit:
    """The credit of every token in every row of a block, which grows pass by pass."""

    def __init__(self, *, alpha: float, beta: float, gamma: float) -> None:
        """Of one block that begins; the formula is at `bonus`."""
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._credit: dict[int, Tensor] = {}  # row of the block: [V]

    def bonus(self, logits: Tensor, probabilities: Tensor, places: list[int]) -> Tensor:
        """What the pass adds to logits: alpha * ln(1 + C), [n, V].

        Before that, C = beta * C for each row, and C of its likeliest token grows by p1 ^ gamma.

        Args:
            logits: controlled, of the masked rows at `places` of the block.
            probabilities: their softmax [n, V].
        """
        rows = range(len(places))
        zero = torch.zeros_like(logits[0])
        credit = torch.stack([self._credit.get(place, zero) for place in places]) * self._beta
        likeliest = logits.argmax(-1)
        credit[rows, likeliest] += probabilities[rows, likeliest] ** self._gamma
        self._credit = dict(zip(places, credit.unbind(), strict=True))
        return self._alpha * credit.log1p()
