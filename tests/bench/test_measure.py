"""Every kind of forward is timed beside its floor."""

import pytest

from clover_local.bench import measure as module
from clover_local.bench.measure import Subject, measure
from clover_local.bench.models import random_model
from clover_local.config import ModelConfig


@pytest.fixture(autouse=True)
def small_reference_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(module, "CUBE", 64)


def test_every_kind_of_forward_is_timed_beside_its_floor(golden_config: ModelConfig) -> None:
    model = random_model(golden_config, seed=3)
    report = measure([Subject("random", model)], repeats=1)
    (measured,) = report.models
    assert [forward.name for forward in measured.forwards] == [
        "pass",
        "commit",
        "AR token",
        "prompt",
    ]
    for forward in measured.forwards:
        assert forward.milliseconds > 0
        floor = sum(map(report.rates.seconds, forward.operators))
        assert forward.ratio == pytest.approx(forward.milliseconds / (1000 * floor))
        assert 1 <= forward.distinct_experts <= golden_config.num_experts
    assert measured.forwards[2].distinct_experts == 2  # one row uses the experts of one token
    assert measured.kernels[1] == "trunk: float32 by torch"
    json = report.to_json()["models"]
    assert isinstance(json, list)
    assert json[0]["weights"] == "random"
    assert json[0]["forwards"][0]["rows"] == 32


def test_two_models_are_timed_in_turns(golden_config: ModelConfig) -> None:
    subjects = [
        Subject(kind, random_model(golden_config, weights=kind)) for kind in ("int4", "float32")
    ]
    packed, plain = measure(subjects, repeats=1).models
    assert (packed.name, plain.name) == ("int4", "float32")
    assert packed.kernels[0].startswith("experts: INT4 in groups of 32 by")
    for narrow, wide in zip(packed.forwards, plain.forwards, strict=True):
        assert (narrow.name, narrow.rows) == (wide.name, wide.rows)
        assert sum(o.bytes for o in narrow.operators) < sum(o.bytes for o in wide.operators)
