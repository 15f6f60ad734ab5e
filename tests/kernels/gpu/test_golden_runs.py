"""Golden runs from prompt to text with every operator in Triton, the pick included."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clover_local.decoding.settings import resolve
from clover_local.generate import Generator
from clover_local.kernels.choice import VARIABLE
from clover_local.session import load, open_model


def write_generation_config(folder: Path, values: Mapping[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")


def generator_of(folder: Path, case: Mapping[str, Any], *, most: int, device: str) -> Generator:
    """What runs one golden case, or its start of `most` tokens."""
    opened = open_model(str(folder))
    given = {"mode": case["mode"], "max_new_tokens": min(most, case["max_new_tokens"])}
    settings = resolve(
        opened.config, opened.generation, {**given, "threshold": case.get("threshold")}
    ).settings
    return load(opened, settings, context=500, device=device, dtype="float32").generator


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("pad_stops_and_suppressed", 70), ("ar_penalties", 3)])
def test_golden_run(
    name: str,
    most: int,
    model_folder: Path,
    golden_cases: Mapping[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block of 11 passes and its commit; and the first tokens of `ar` under penalties."""
    monkeypatch.setenv(VARIABLE, "triton")
    (case,) = (each for each in golden_cases["runs"] if each["name"] == name)
    write_generation_config(model_folder, case["generation_config"])
    generator = generator_of(model_folder, case, most=most, device=device)
    for _ in generator.run(golden_cases["prompt"]):
        pass
    result = generator.result
    assert result is not None
    assert list(result.token_ids) == case["tokens"][:most]
    if case["mode"] == "ar":
        return
    assert [len(block.passes) for block in result.blocks] == case["passes"]
    passes = [rows for block in result.blocks for rows in block.passes]
    for rows, expected in zip(passes, case["fixed_per_pass"], strict=True):
        assert [[fixed.row, fixed.token] for fixed in rows] == [row[:2] for row in expected]
        confidences = [fixed.confidence for fixed in rows]
        assert confidences == pytest.approx([row[2] for row in expected], abs=1e-5)
