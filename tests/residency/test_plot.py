"""Charts of a simulation: what is refused before any work, and the files that are written."""

import sys
from pathlib import Path

import pytest

from clover_local.errors import CloverError
from clover_local.residency.plot import draw, require_plot
from clover_local.residency.simulate import simulate
from clover_local.residency.synthetic import Synthetic, synthetic_trace


@pytest.mark.parametrize("name", ["chart.pdf", "chart"])
def test_other_kinds_of_file_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CloverError, match=r"a chart is \.png or \.svg"):
        require_plot(tmp_path / name)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="there is no folder"):
        require_plot(tmp_path / "none" / "chart.svg")


def test_missing_matplotlib_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CloverError, match=r"pip install 'clover-local\[plot\]'"):
        require_plot(tmp_path / "chart.svg")


def test_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = synthetic_trace(Synthetic(layers=2, experts=16, experts_per_token=2, blocks=4))
    draw(simulate(made, slots=[8, 24], policies=["lru", "lfru"]), tmp_path / "c.svg", title="t")
    assert (tmp_path / "c.svg").stat().st_size > 1000
