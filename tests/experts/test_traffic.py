"""Sums over the kinds of forward."""

from clover_local.experts.traffic import OffloadStats, Traffic
from clover_local.residency.table import Counts


def test_totals_are_those_of_all_kinds() -> None:
    stats = OffloadStats(
        counts={"prompt": Counts(hits=1, misses=2), "preview": Counts(hits=5, evicted=3)},
        traffic={"prompt": Traffic(2, 512, 1.5, 0.25), "commit": Traffic(1, 256, 0.5, 0.5)},
        filled=Traffic(9, 9),
        slots=4,
        passing=1,
        resident=3,
        experts=12,
        device_bytes=1024,
        pinned_bytes=0,
    )
    assert stats.total == Counts(hits=6, misses=2, evicted=3)
    assert stats.copied == Traffic(3, 768, 2.0, 0.75)
    assert stats.counts["prompt"] == Counts(hits=1, misses=2)
