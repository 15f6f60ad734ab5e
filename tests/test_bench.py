"""The bench counts what a forward reads, and times every kind of forward once."""

import math

import pytest
import torch

from clover_local.bench import Operator, Rates, measure, operators, random_model, real_layers
from clover_local.checkpoint.parameters import count_parameters, parameter_shapes
from clover_local.config import ModelConfig
from clover_local.model.clover import Clover

NOT_PRODUCTS = ("embed_tokens", "norm", "conv", "A_log", "dt_bias", "bd_softmax")


def test_the_bytes_of_all_products_are_the_bytes_of_all_their_weights(
    golden_config: ModelConfig,
) -> None:
    weights = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(golden_config).items()
        if not any(part in name for part in NOT_PRODUCTS)
    )
    parts = operators(
        golden_config,
        rows=1,
        committed=0,
        expert_uses=1,
        distinct=golden_config.num_experts * golden_config.num_hidden_layers,
        width=4,
    )
    state = {"GDN state", "attention"}
    assert sum(part.bytes for part in parts if part.name not in state) == 4 * weights


def test_a_token_of_the_real_layers_multiplies_with_the_active_parameters() -> None:
    config = real_layers()
    uses = config.num_experts_per_tok * config.num_hidden_layers
    parts = operators(config, rows=1, committed=0, expert_uses=uses, distinct=uses, width=4)
    products = sum(p.flops for p in parts if p.name not in {"GDN state", "attention"}) / 2
    active = count_parameters(config, diffusion=False).active
    assert products == pytest.approx(active, rel=1e-3)  # norms, convolutions and gates are the rest


def test_the_floor_of_an_operator_is_its_slower_side() -> None:
    rates = Rates(bytes_per_second=100.0, flops_per_second=1000.0)
    assert rates.seconds(Operator("reads", 500.0, 10.0)) == 5.0
    assert rates.seconds(Operator("multiplies", 10.0, 3000.0)) == 3.0


def test_more_rows_multiply_more_and_read_the_same() -> None:
    config = real_layers()
    one, many = (
        operators(config, rows=rows, committed=0, expert_uses=rows, distinct=1, width=4)[0]
        for rows in (1, 64)
    )
    assert one.bytes == many.bytes
    assert many.flops == 64 * one.flops


def test_every_kind_of_forward_is_timed_beside_its_floor(random_model_of_golden: Clover) -> None:
    report = measure(random_model_of_golden, repeats=1)
    assert [forward.name for forward in report.forwards] == ["pass", "commit", "AR token"]
    for forward in report.forwards:
        assert forward.milliseconds > 0
        floor = sum(map(report.rates.seconds, forward.operators))
        assert forward.ratio == pytest.approx(forward.milliseconds / (1000 * floor))
        assert 1 <= forward.distinct_experts <= random_model_of_golden.config.num_experts
    assert report.forwards[2].distinct_experts == 2  # one row uses the experts of one token
    json = report.to_json()
    assert isinstance(json["forwards"], list)
    assert json["forwards"][0]["rows"] == 32


@pytest.fixture
def random_model_of_golden(golden_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> Clover:
    """A random model of the golden shapes; the reference products are small."""
    monkeypatch.setattr("clover_local.bench.READ_BYTES", 1 << 16)
    monkeypatch.setattr("clover_local.bench.CUBE", 16)
    model = random_model(golden_config, seed=3)
    assert model.embedding.dtype == torch.float32
    return model
