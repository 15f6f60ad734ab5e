"""The `hierarchy` rule: one row in the middle of every gap, beside all sure ones.

The best row of each run of masks splits that run, so that the next pass sees shorter ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clover_local.decoding.pick import Accept, RowStatistics
from clover_local.decoding.rules.most_confident import or_most_confident

HIERARCHY = "hierarchy"


def hierarchy(
    rows: RowStatistics, *, places: Sequence[int], low: float, threshold: float
) -> Accept:
    """All rows above `threshold`, and the best of each run of masks if it is above `low`.

    Args:
        rows: statistics of the masked rows, at least one.
        places: their rows in the block, ascending; neighbours form a run.
        low: compared in float32, as the confidence is; so is `threshold`.

    Raises:
        ValueError: another number of places than of rows.
    """
    if len(places) != len(rows.confidence):
        raise ValueError(f"{len(places)} places for {len(rows.confidence)} rows")
    accept = rows.confidence > torch.tensor(threshold, dtype=torch.float32)
    enough = rows.confidence > torch.tensor(low, dtype=torch.float32)
    for run in _runs(places):
        best = run[int(rows.confidence[run].argmax())]  # the first of equals
        accept[best] |= enough[best]
    return or_most_confident(rows, accept, reason=HIERARCHY)


def _runs(places: Sequence[int]) -> list[Tensor]:
    """Indices into `places`, a tensor for each run of neighbours."""
    if not len(places):
        return []
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    ends = [*starts[1:], len(places)]
    return [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
