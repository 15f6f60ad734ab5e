"""Hand-made statistics of masked rows."""

from collections.abc import Callable, Sequence

import pytest
import torch

from clover_local.decoding.pick import RowStatistics

Table = Callable[..., RowStatistics]


@pytest.fixture
def table() -> Table:
    """Makes rows of given confidences; what is not given is NaN, so a rule may not read it."""

    def make(
        *confidences: float,
        entropy: Sequence[float] | None = None,
        second: Sequence[float] | None = None,
        raw: Sequence[float] | None = None,
        still: Sequence[int] | None = None,
    ) -> RowStatistics:
        rows = len(confidences)
        confidence = torch.tensor(confidences)
        unread = torch.full((rows,), torch.nan)
        others = unread if second is None else torch.tensor(second)
        return RowStatistics(
            token=torch.arange(rows) + 100,
            confidence=confidence,
            raw_confidence=unread if raw is None else torch.tensor(raw),
            entropy=unread if entropy is None else torch.tensor(entropy),
            top_ids=torch.stack([torch.arange(rows) + 100, torch.zeros(rows).long()], -1),
            top_probabilities=torch.stack([confidence, others], -1),
            still_passes=None if still is None else torch.tensor(still),
        )

    return make
