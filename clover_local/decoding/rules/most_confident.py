"""What every rule does where no row qualifies: the most confident one leaves the mask."""

import torch
from torch import Tensor

from clover_local.decoding.pick import Accept, RowStatistics

MOST_CONFIDENT = "most_confident"


def or_most_confident(rows: RowStatistics, accept: Tensor, *, reason: str) -> Accept:
    """The rows of `accept` [n] for `reason`; if there is none, the most confident one.

    On a tie that is the lowest row.

    Raises:
        ValueError: no row, or a confidence that is NaN.
    """
    refuse_nan(rows.confidence, "confidence")
    if not bool(accept.any()):
        accept = torch.zeros_like(accept)
        accept[int(rows.confidence.argmax())] = True  # argmax gives the first of equals
        reason = MOST_CONFIDENT
    return Accept(accept, tuple(reason if taken else "" for taken in accept.tolist()))


def refuse_nan(values: Tensor, name: str) -> None:
    """A rule that compared a NaN would choose by accident.

    Raises:
        ValueError: `values` [n] has a NaN, or no entry.
    """
    if not len(values):
        raise ValueError("a rule needs at least one masked row, not 0")
    broken = values.isnan()
    if bool(broken.any()):
        raise ValueError(f"masked row {int(broken.int().argmax())} has the {name} NaN")


def falling(values: Tensor) -> Tensor:
    """The order [n] of `values` from the largest down, the lower row first on a tie."""
    return values.sort(descending=True, stable=True).indices
