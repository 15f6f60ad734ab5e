"""Charts: what is refused before any work, and the files that are written."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.errors import CloverError
from clover_local.quant.documents import Document
from clover_local.quant.evaluation.evaluate import evaluate
from clover_local.quant.evaluation.plot import draw, require_plot
from clover_local.session import OpenModel


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "chart.png.txt"])
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


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "against"])
def test_chart_is_written(
    alone: bool, suffix: str, golden: OpenModel, documents: tuple[Document, ...], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart{suffix}"
    require_plot(path)
    found = evaluate(golden, against=None if alone else golden, documents=documents)
    draw(found, path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)


def test_chart_of_experts_that_saw_no_row(
    golden: OpenModel, documents: tuple[Document, ...], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    found = evaluate(golden, documents=documents)
    counts = ((0,) * 7 + (9,),) * 4
    draw(replace(found, model=replace(found.model, tokens_per_expert=counts)), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").exists()
