"""`bench`: tables on stdout, and which weights go together."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from clover_local.bench import measure, models
from clover_local.config import ModelConfig


@pytest.fixture(autouse=True)
def small_shapes(golden_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden shapes stand for the real ones; the reference products are small."""
    monkeypatch.setattr(models, "real_layers", lambda: golden_config)
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "CUBE", 64)


Run = Callable[..., Any]


def test_table_says_what_multiplies(run: Run) -> None:
    outcome = run("bench", "--repeats", "1")
    assert outcome.code == 0
    for word in ("float32: ", "pass", "commit", "AR token", "prompt", "experts: float32 by torch"):
        assert word in outcome.out
    assert "against" not in outcome.out


def test_two_kinds_of_weights_are_compared(run: Run) -> None:
    outcome = run("bench", "--weights", "int4", "--against", "float32", "--repeats", "1")
    assert outcome.code == 0
    assert "experts: INT4 in groups of 32" in outcome.out
    assert "int4 against float32" in outcome.out
    assert "times faster" in outcome.out


def test_json_holds_every_model(run: Run) -> None:
    outcome = run("bench", "--weights", "int4", "--repeats", "1", "--json")
    (model,) = json.loads(outcome.out)["models"]
    assert model["weights"] == "int4"
    assert len(model["kernels"]) == 3
    assert [forward["name"] for forward in model["forwards"]] == list(measure.KINDS)


def test_model_keeps_its_own_weights(run: Run) -> None:
    outcome = run("bench", "demo", "--against", "int4")
    assert outcome.code == 2
    assert "a MODEL has its own weights" in outcome.err


def test_unknown_weights_are_refused(run: Run) -> None:
    outcome = run("bench", "--weights", "int5")
    assert outcome.code == 2
    assert "int5" in outcome.err
