"""Charts of a simulation."""

from pathlib import Path

import pytest

from clover_local.residency.plot import draw
from clover_local.residency.simulate import simulate
from clover_local.residency.synthetic import Synthetic, synthetic_trace


def test_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = synthetic_trace(Synthetic(layers=2, experts=16, experts_per_token=2, blocks=4))
    draw(simulate(made, slots=[8, 24], policies=["lru", "lfru"]), tmp_path / "c.svg", title="t")
    assert (tmp_path / "c.svg").stat().st_size > 1000
