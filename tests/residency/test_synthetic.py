"""The synthetic trace has the statistics that are published."""

import numpy as np
import pytest

from clover_local.residency.statistics import statistics
from clover_local.residency.synthetic import Synthetic, synthetic_trace
from clover_local.residency.trace import RoutingTrace


def test_it_has_the_published_statistics(trace: RoutingTrace) -> None:
    found = statistics(trace)
    previews = [(f.rows > 0).sum(axis=1).mean() for f in trace.forwards if f.kind == "preview"]
    assert np.mean(previews) == pytest.approx(70, abs=3)
    assert found.experts_commit == pytest.approx(100, abs=4)
    assert found.alike_passes == pytest.approx(0.985, abs=0.002)
    assert found.share_top_half > 0.8


def test_masks_route_more_alike_than_text(trace: RoutingTrace) -> None:
    found = statistics(trace)
    assert found.experts_first is not None and found.experts_commit is not None
    assert found.experts_first < found.experts_commit / 2


def test_the_seed_decides_all() -> None:
    small = Synthetic(layers=2, experts=16, experts_per_token=2, blocks=3)
    first, again, other = (
        synthetic_trace(Synthetic(**{**small.__dict__, "seed": seed})) for seed in (1, 1, 2)
    )
    assert all(
        np.array_equal(a.rows, b.rows) for a, b in zip(first.forwards, again.forwards, strict=True)
    )
    assert not np.array_equal(first.forwards[0].rows, other.forwards[0].rows)


def test_every_row_uses_its_number_of_experts() -> None:
    made = synthetic_trace(Synthetic(layers=2, experts=16, experts_per_token=3, rows=5, blocks=2))
    assert {int(rows.sum()) for forward in made.forwards for rows in forward.rows} == {15}
