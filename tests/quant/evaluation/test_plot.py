"""Charts of an evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.quant.documents import Document
from clover_local.quant.evaluation.evaluate import evaluate
from clover_local.quant.evaluation.plot import draw
from clover_local.session import OpenModel


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "against"])
def test_chart_is_written(
    alone: bool, suffix: str, golden: OpenModel, documents: tuple[Document, ...], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"chart{suffix}"
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
