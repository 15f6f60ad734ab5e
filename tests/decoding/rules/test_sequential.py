"""From the left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.sequential import sequential


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_leftmost_rows_whatever_their_confidence(
    k: int, table: Callable[..., RowStatistics]
) -> None:
    accept = sequential(table(0.1, 0.9, 0.3), k=k).accept
    assert accept.tolist() == [row < k for row in range(3)]
