"""Statistics of traces that are small enough to count by hand."""

import numpy as np
import pytest

from clover_local.residency.demand import Kind
from clover_local.residency.statistics import statistics
from clover_local.residency.trace import Forward, RoutingTrace


def forward(
    kind: Kind, block: int, number: int, rows: list[int], masked: list[int] | None = None
) -> Forward:
    return Forward(
        kind,
        block,
        number,
        np.array([rows], np.uint16),
        None if masked is None else np.array([masked], np.uint16),
    )


FORWARDS = (
    forward("prompt", 0, 0, [1, 1, 1, 0]),
    forward("preview", 0, 0, [2, 2, 0, 0], [2, 2, 0, 0]),
    forward("preview", 0, 1, [2, 0, 2, 0], [2, 0, 0, 0]),
    forward("commit", 0, 2, [1, 0, 2, 1]),
    forward("preview", 1, 0, [0, 4, 0, 0], [0, 4, 0, 0]),
    forward("commit", 1, 1, [0, 2, 2, 0]),
)


def test_of_a_trace_counted_by_hand() -> None:
    found = statistics(RoutingTrace(1, 4, FORWARDS))
    assert (found.blocks, found.previews_per_block) == (2, 1.5)
    assert (found.experts_first, found.experts_later, found.experts_commit) == (1.5, 2, 2.5)
    assert (found.experts_block, found.experts_prompt) == (3, 3)
    assert found.alike_passes == pytest.approx(0.5)
    assert found.new_later == 1  # expert 2
    assert found.new_commit == 1  # expert 3 in the first block, 2 in the second
    assert found.again_block == 1
    assert found.again_first == 1
    assert (found.experts_masks, found.experts_text, found.alike_masks_text) == (1, 1, 0)
    assert found.share_top_quarter == pytest.approx(3 / 10)
    assert found.share_top_half == pytest.approx(6 / 10)


def test_blocks_of_two_runs_are_not_compared() -> None:
    apart = (*FORWARDS[:4], forward("prompt", 1, 0, [1, 1, 0, 0]), *FORWARDS[4:])
    assert statistics(RoutingTrace(1, 4, apart)).again_block is None


def test_what_a_trace_has_not_is_none() -> None:
    found = statistics(RoutingTrace(1, 4, FORWARDS[3:4]))
    assert found.experts_first is found.alike_passes is found.experts_masks is None
    assert found.alike_prompt_answer is None
